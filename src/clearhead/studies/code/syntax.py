"""Which part of speech of a programming language each token is: tree-sitter parses, character offsets align.

Two readings of one token: its *class* (identifier, keyword, operator …), from the lexeme that it lies in, and its
*part* (declaration, condition, loop, call …), from the innermost such node whose head, not whose body, it stands in:
in `if (a) { b(); }` the words `if (a)` are of the condition and `b()` is a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from clearhead.errors import InputError, unknown
from clearhead.units import Units

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

#: Language → the package of its grammar, and the function in it.
GRAMMARS = {
    "python": ("tree_sitter_python", "language"),
    "java": ("tree_sitter_java", "language"),
    "csharp": ("tree_sitter_c_sharp", "language"),
    "go": ("tree_sitter_go", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "php": ("tree_sitter_php", "language_php_only"),
    "ruby": ("tree_sitter_ruby", "language"),
}
#: How files of each language end.
ENDINGS = {
    ".py": "python",
    ".java": "java",
    ".cs": "csharp",
    ".go": "go",
    ".js": "javascript",
    ".php": "php",
    ".rb": "ruby",
}
ALIASES = {"c#": "csharp", "cs": "csharp", "js": "javascript", "py": "python", "rb": "ruby", "golang": "go"}
#: What stands around a method that comes without its class.
CLASSES_AROUND = dict.fromkeys(("java", "csharp", "javascript", "php"), ("class _ {", "}"))

CLASSES = (
    "identifier",
    "type",
    "keyword",
    "modifier",
    "operator",
    "separator",
    "number",
    "string",
    "constant",
    "comment",
    "annotation",
    "layout",
    "mask",
    "special",
)
PARTS = (
    "declaration",
    "parameters",
    "condition",
    "loop",
    "call",
    "assignment",
    "return",
    "exception",
    "import",
    "comment",
    "statement",
    "layout",
    "mask",
    "special",
)
_MODIFIERS = frozenset(
    (
        *("public", "private", "protected", "internal", "static", "final", "abstract", "virtual", "override", "sealed"),
        *("readonly", "synchronized", "native", "transient", "volatile", "async", "extern", "unsafe", "partial"),
        *("const", "strictfp", "default"),
    )
)
_SEPARATORS = frozenset(["(", ")", "[", "]", "{", "}", ";", ",", ".", ":", "::", "${", "#{", "$"])
_CONSTANTS = frozenset(
    ("true", "false", "null", "none", "nil", "undefined", "null_literal", "boolean", "boolean_literal")
)
_TYPES = frozenset(
    (
        *("integral_type", "floating_point_type", "boolean_type", "void_type"),
        *("predefined_type", "primitive_type", "implicit_type"),
    )
)
#: Go's grammar calls its basic types names like any other.
_GO_TYPES = re.compile(r"u?int(8|16|32|64|ptr)?|float(32|64)|complex(64|128)|bool|byte|rune|string|error|any")
_NUMBER = re.compile(r"integer|float|number|int_literal|real_literal|imaginary|rune|rational|complex$|decimal")
_STRING = re.compile(r"string|character_literal|char_literal|heredoc|nowdoc|regex|symbol|escape_sequence|shell_command")
_CODE_IN_STRING = frozenset(["interpolation", "template_substitution", "format_expression", "variable_name"])
#: Node types of each part; the first that matches, from the token upwards, is meant.
_PARTS = tuple(
    (part, re.compile(rf"(?:{types})"))
    for part, types in {
        "comment": r".*comment",
        "parameters": r"(?:formal_|method_|block_|lambda_)?parameters|(?:bracketed_)?parameter_list"
        r"|parameter_declaration",
        "import": r"import.*|using_directive|package_.*|namespace_use_declaration|future_import_statement",
        "return": r"return.*|yield.*",
        "exception": r"try.*|catch.*|except.*|finally.*|throw.*|raise.*|rescue.*|ensure|defer_statement",
        "loop": r"for|foreach|while|until|for_.*|while_.*|do_.*statement|enhanced_for_.*|foreach_.*|range_clause",
        "condition": r"if|unless|elsif|case|when|if_.*|elif_.*|else|else_.*|switch.*|match.*|case_.*|unless_.*"
        r"|conditional.*|ternary_.*|expression_(?:switch|case)|type_switch.*|communication_case|select_statement",
        "call": r"call|call_expression|method_invocation|invocation_expression|object_creation_expression"
        r"|.*_call_expression|new_expression|explicit_constructor_invocation|constructor_initializer",
        "assignment": r"(?:augmented_|operator_)?assignment(?:_expression|_statement)?|named_expression"
        r"|augmented_assignment_expression|(?:local_)?variable_declaration|local_declaration_statement"
        r"|lexical_declaration|short_var_declaration|var_declaration|const_declaration|inc_statement|dec_statement"
        r"|update_expression|(?:post|pre)fix_unary_expression",
        "declaration": r".*_declaration|.*_definition|local_function_statement|method|singleton_method|class|module"
        r"|decorator|func_literal|lambda.*|arrow_function|function|class_specifier",
    }.items()
)
_FUNCTION = re.compile(
    r"function_definition|(?:generator_)?function_declaration|method_declaration|method_definition"
    r"|constructor_declaration|method|singleton_method|local_function_statement"
)
#: JavaScript's functions that have their name from the variable that they are put into.
_NAMED_BY_VARIABLE = re.compile(r"lexical_declaration|variable_declaration")
_WITHOUT_NAME = re.compile(r"arrow_function|(?:generator_)?function_expression")
#: A token in the body of a node is not of that node's head.
_BODY = re.compile(
    r"block|statement_block|compound_statement|statement_list|body_statement|class_body|interface_body|enum_body"
    r"|declaration_list|constructor_body|then|do|do_block|block_body|switch_block|switch_body|field_declaration_list"
    r"|expression_statement"
)


@dataclass(frozen=True)
class Lexeme:
    """A leaf of the tree: where it stands in the text (characters), and how it is read."""

    start: int
    stop: int
    kind: str
    part: str


@dataclass(frozen=True)
class Syntax:
    """The lexemes of one text, in order. `broken` says that the parser found errors."""

    text: str
    language: str
    lexemes: tuple[Lexeme, ...]
    broken: bool = False

    def masked(self, start: int, stop: int, mask: str) -> Syntax:
        """The same reading of a text in which the mask stands for some characters.

        What is masked is of the class "mask"; the rest keeps the class that it has in the whole text, which a parser
        would not find in the masked one.
        """
        moved = len(mask) - (stop - start)
        before = [replace(one, stop=min(one.stop, start)) for one in self.lexemes if one.start < start]
        after = [
            replace(one, start=max(one.start, stop) + moved, stop=one.stop + moved)
            for one in self.lexemes
            if one.stop > stop
        ]
        hidden = Lexeme(start, start + len(mask), "mask", "mask")
        text = self.text[:start] + mask + self.text[stop:]
        return replace(self, text=text, lexemes=(*before, hidden, *after))


def language_named(name: str) -> str:
    """
    >>> language_named("C#")
    'csharp'
    """
    lower = name.lower()
    found = ALIASES.get(lower, lower)
    if found not in GRAMMARS:
        raise unknown("language", name, GRAMMARS)
    return found


def parse(text: str, language: str) -> Syntax:
    """Every lexeme of a text with its class and its part.

    A method that comes without its class is also read inside one, and the reading with fewer errors is kept.

    >>> [(one.kind, "x = f(1)"[one.start : one.stop]) for one in parse("x = f(1)", "python").lexemes][:3]
    [('identifier', 'x'), ('operator', '='), ('identifier', 'f')]
    """
    name = language_named(language)
    plain = _read(text, name, "", "")
    if not plain.broken or name not in CLASSES_AROUND:
        return plain
    around = _read(text, name, *CLASSES_AROUND[name])
    return plain if around.broken else around


def functions(text: str, language: str) -> list[str]:
    """The functions and methods of a source file, inner ones within their outer ones, without their indentation.

    >>> functions("x = 1\\nclass A:\\n    def f(self):\\n        return x\\n", "python")
    ['def f(self):\\n    return x']
    """
    name = language_named(language)
    whole = text.removeprefix("<?php") if name == "php" else text
    waiting, found = [parser_of(name).parse(whole.encode()).root_node], []
    while waiting:
        node = waiting.pop()
        if _is_function(node):
            found.append(_undented((node.text or b"").decode(errors="replace"), node.start_point.column))
        else:
            waiting += reversed(node.children)
    return found


def _is_function(node: Node) -> bool:
    if _NAMED_BY_VARIABLE.fullmatch(node.type):
        values = [one.child_by_field_name("value") for one in node.named_children]
        return any(one is not None and _WITHOUT_NAME.fullmatch(one.type) for one in values)
    return node.is_named and _FUNCTION.fullmatch(node.type) is not None


def _undented(text: str, indent: int) -> str:
    first, *rest = text.split("\n")
    return "\n".join([first, *(line[indent:] if not line[:indent].strip() else line for line in rest)])


def _read(text: str, language: str, before: str, after: str) -> Syntax:
    whole = f"{before}{text}{after}"
    root = parser_of(language).parse(whole.encode()).root_node
    places = _characters(whole)
    lexemes = [
        Lexeme(start, stop, _kind(leaf, language), _part(leaf))
        for leaf in leaves(root)
        if (start := places[leaf.start_byte] - len(before)) >= 0
        and (stop := places[leaf.end_byte] - len(before)) <= len(text)
        and start < stop
    ]
    return Syntax(text, language, tuple(lexemes), root.has_error)


@cache
def parser_of(language: str) -> Parser:
    try:
        tree_sitter = import_module("tree_sitter")
        package, function = GRAMMARS[language]
        grammar = getattr(import_module(package), function)()
    except ImportError as problem:
        raise InputError(f"syntax needs tree-sitter ({problem}): pip install 'clearhead[code]'") from problem
    parser: Parser = tree_sitter.Parser(tree_sitter.Language(grammar))
    return parser


def leaves(node: Node) -> Iterator[Node]:
    """From left to right. Depth is not limited by Python's stack: real code nests deep."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.child_count:
            waiting += reversed(one.children)
        else:
            yield one


def _characters(text: str) -> list[int]:
    """For each byte of the text in UTF-8, and for its end, which character it belongs to."""
    places = [place for place, sign in enumerate(text) for _ in range(len(sign.encode()))]
    return [*places, len(text)]


def _kind(leaf: Node, language: str) -> str:
    kind, words = leaf.type, (leaf.text or b"").decode(errors="replace")
    above = leaf.parent.type if leaf.parent is not None else ""
    if "comment" in kind or "comment" in above or _is_documentation(leaf):
        return "comment"
    if kind.lower() in _CONSTANTS or (not leaf.is_named and above.lower() in _CONSTANTS):
        return "constant"
    if _STRING.search(kind) or (_STRING.search(above) and above not in _CODE_IN_STRING and kind not in _CODE_IN_STRING):
        return "string"
    if (
        kind in _TYPES
        or above in _TYPES
        or (kind == "type_identifier" and language == "go" and _GO_TYPES.fullmatch(words))
    ):
        return "type"
    if leaf.is_named:
        return "number" if _NUMBER.search(kind) else "identifier"
    if words == "@" and any(name in above for name in ("annotation", "decorator")):
        return "annotation"
    if words == "$" and above == "variable_name":
        return "identifier"
    if words[:1].isalpha():
        return "modifier" if words in _MODIFIERS else "keyword"
    between = words in _SEPARATORS or above == "block_parameters"
    return "separator" if between else "operator"


def _is_documentation(leaf: Node) -> bool:
    """A string that stands as a statement of its own, as Python's docstrings do."""
    string = leaf.parent
    if string is None or string.type != "string" or string.parent is None:
        return False
    return string.parent.type == "expression_statement" and string.parent.child_count == 1


def _part(leaf: Node) -> str:
    if _is_documentation(leaf):
        return "comment"
    node: Node | None = leaf if leaf.is_named else leaf.parent
    while node is not None and node.parent is not None:
        for part, types in _PARTS:
            if types.fullmatch(node.type):
                return part
        if _BODY.fullmatch(node.type) and not _closes(leaf, node):
            return "statement"
        node = node.parent
    return "statement"


def _closes(leaf: Node, body: Node) -> bool:
    """Braces (`end` in Ruby) around a body belong to the head that opens it."""
    return not leaf.is_named and leaf.parent == body and (leaf.text or b"") in (b"{", b"}", b"end", b"do")


# -- tokens


@dataclass(frozen=True)
class Reading:
    """The class and the part of each unit of a model's input."""

    kinds: tuple[str, ...]
    parts: tuple[str, ...]

    def of(self, by: str) -> tuple[str, ...]:
        if by not in ("class", "part"):
            raise unknown("reading of syntax", by, ("class", "part"))
        return self.kinds if by == "class" else self.parts


def align(units: Units, sources: Sequence[Syntax]) -> Reading:
    """Each unit is what most of its characters are, white space aside; one without any other is layout.

    Special tokens are a class of their own, but for the mask.
    """
    if units.offsets is None:
        raise InputError("syntax is aligned by characters: give texts, and load the model with a fast tokenizer")
    segments = units.segments or (0,) * len(units)
    if max(segments) >= len(sources):
        raise InputError(f"the input has {max(segments) + 1} texts, but {len(sources)} were parsed")
    owners = [_owners(source) for source in sources]
    kinds, parts = [], []
    for place, (segment, (start, stop)) in enumerate(zip(segments, units.offsets, strict=True)):
        source = sources[segment]
        inside = [owners[segment][at] for at in range(start, stop) if not source.text[at].isspace()]
        found = [one for one in inside if one is not None]
        hidden = any(one.kind == "mask" for one in found)
        if units.special[place] and not hidden:
            kinds.append("special")
            parts.append("special")
        elif not found:
            kinds.append("layout")
            parts.append("layout")
        else:
            most = max(dict.fromkeys(found), key=found.count)
            kinds.append(most.kind)
            parts.append(most.part)
    return Reading(tuple(kinds), tuple(parts))


def _owners(source: Syntax) -> list[Lexeme | None]:
    owners: list[Lexeme | None] = [None] * len(source.text)
    for lexeme in source.lexemes:
        for at in range(lexeme.start, min(lexeme.stop, len(owners))):
            owners[at] = lexeme
    return owners
