"""Classify the tokens of source code with tree-sitter, and align them with the units of a model's input.

Each token has two labels: a *class* (identifier, keyword, operator …) from the leaf that it lies in, and a *part*
(declaration, condition, loop, call …) from the innermost such node whose head, not whose body, contains it:
in `if (a) { b(); }` the tokens `if (a)` belong to the condition and `b()` is a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from clearhead.errors import InputError, unknown_value_error
from clearhead.units import Units

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

#: Language → package of its tree-sitter grammar, and the function in it that returns the grammar.
GRAMMARS = {
    "python": ("tree_sitter_python", "language"),
    "java": ("tree_sitter_java", "language"),
    "csharp": ("tree_sitter_c_sharp", "language"),
    "go": ("tree_sitter_go", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "php": ("tree_sitter_php", "language_php_only"),
    "ruby": ("tree_sitter_ruby", "language"),
}
#: File suffix → language.
LANGUAGE_BY_SUFFIX = {
    ".py": "python",
    ".java": "java",
    ".cs": "csharp",
    ".go": "go",
    ".js": "javascript",
    ".php": "php",
    ".rb": "ruby",
}
LANGUAGE_ALIASES = {"c#": "csharp", "cs": "csharp", "js": "javascript", "py": "python", "rb": "ruby", "golang": "go"}
#: Text around a method that is given without its class, so that it parses.
CLASS_WRAPPERS = dict.fromkeys(("java", "csharp", "javascript", "php"), ("class _ {", "}"))

TOKEN_CLASSES = (
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
SYNTAX_PARTS = (
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
#: The Go grammar has no node type for basic types: they are ordinary type identifiers.
_GO_TYPE_PATTERN = re.compile(r"u?int(8|16|32|64|ptr)?|float(32|64)|complex(64|128)|bool|byte|rune|string|error|any")
_NUMBER_PATTERN = re.compile(r"integer|float|number|int_literal|real_literal|imaginary|rune|rational|complex$|decimal")
_STRING_PATTERN = re.compile(
    r"string|character_literal|char_literal|heredoc|nowdoc|regex|symbol|escape_sequence|shell_command"
)
_STRING_INTERPOLATION_TYPES = frozenset(
    ["interpolation", "template_substitution", "format_expression", "variable_name"]
)
#: Node types of each part. The innermost node that matches one of them decides.
_SYNTAX_PART_PATTERNS = tuple(
    (part_name, re.compile(rf"(?:{types})"))
    for part_name, types in {
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
_FUNCTION_PATTERN = re.compile(
    r"function_definition|(?:generator_)?function_declaration|method_declaration|method_definition"
    r"|constructor_declaration|method|singleton_method|local_function_statement"
)
#: JavaScript functions that are assigned to a variable.
_VARIABLE_DECLARATION_PATTERN = re.compile(r"lexical_declaration|variable_declaration")
_ANONYMOUS_FUNCTION_PATTERN = re.compile(r"arrow_function|(?:generator_)?function_expression")
#: Nodes that are bodies: their tokens do not belong to the head of the parent node.
_BODY_PATTERN = re.compile(
    r"block|statement_block|compound_statement|statement_list|body_statement|class_body|interface_body|enum_body"
    r"|declaration_list|constructor_body|then|do|do_block|block_body|switch_block|switch_body|field_declaration_list"
    r"|expression_statement"
)


@dataclass(frozen=True)
class Lexeme:
    """A leaf of the syntax tree: its character span, token class and syntax part.

    Attributes:
        start: First character.
        stop: Character after the last.
        token_class: Class of the token, such as "identifier".
        syntax_part: Part of the tree that it belongs to.
    """

    start: int
    stop: int
    token_class: str
    syntax_part: str


@dataclass(frozen=True)
class ParsedSource:
    """The lexemes of one text, in order.

    Attributes:
        text: Source code.
        language: Key of `GRAMMARS`.
        lexemes: Leaves of the tree that cover all characters but white space.
        has_errors: Whether the parser found syntax errors.
    """

    text: str
    language: str
    lexemes: tuple[Lexeme, ...]
    has_errors: bool = False

    def mask_span(self, start: int, stop: int, mask_token: str) -> ParsedSource:
        """Replace a character span by the mask token.

        The mask gets the class "mask"; the other lexemes keep the class that they have in the unmasked text, because
        the masked text may not parse.

        Args:
            start: First character of the span.
            stop: End of the span, exclusive.
            mask_token: Text of the mask token.
        """
        shift = len(mask_token) - (stop - start)
        lexemes_before = [
            replace(lexeme, stop=min(lexeme.stop, start)) for lexeme in self.lexemes if lexeme.start < start
        ]
        lexemes_after = [
            replace(lexeme, start=max(lexeme.start, stop) + shift, stop=lexeme.stop + shift)
            for lexeme in self.lexemes
            if lexeme.stop > stop
        ]
        mask = Lexeme(start, start + len(mask_token), "mask", "mask")
        text = self.text[:start] + mask_token + self.text[stop:]
        return replace(self, text=text, lexemes=(*lexemes_before, mask, *lexemes_after))


def resolve_language(name: str) -> str:
    """Resolve a language name or alias, ignoring case, to a key of `GRAMMARS`.

    Args:
        name: Name or alias of a programming language.

    Returns:
        The key of `GRAMMARS`.

    Raises:
        InputError: The language is unknown.

    Example:
        >>> resolve_language("C#")
        'csharp'
    """
    lower = name.lower()
    language = LANGUAGE_ALIASES.get(lower, lower)
    if language not in GRAMMARS:
        raise unknown_value_error("language", name, GRAMMARS)
    return language


def parse_source(text: str, language: str) -> ParsedSource:
    """Parse a text and label every lexeme with its class and its part.

    A method without its class does not parse in some languages. If the text has errors, it is parsed once more inside
    a class, and that result is used if it has none.

    Args:
        text: Source code.
        language: Language name or alias.

    Raises:
        InputError: The language is unknown, or tree-sitter is not installed.

    Example:
        >>> text = "x = f(1)"
        >>> [(item.token_class, text[item.start : item.stop]) for item in parse_source(text, "python").lexemes][:3]
        [('identifier', 'x'), ('operator', '='), ('identifier', 'f')]
    """
    name = resolve_language(language)
    bare = _parse_wrapped(text, name, "", "")
    if not bare.has_errors or name not in CLASS_WRAPPERS:
        return bare
    wrapped = _parse_wrapped(text, name, *CLASS_WRAPPERS[name])
    return bare if wrapped.has_errors else wrapped


def extract_functions(text: str, language: str) -> list[str]:
    """Extract the functions and methods of a source file, without their indentation.

    Nested functions are not listed separately.

    Args:
        text: Content of the file.
        language: Language name or alias.

    Returns:
        Source code of each outermost function, in file order.

    Raises:
        InputError: The language is unknown, or tree-sitter is not installed.

    Example:
        >>> extract_functions("x = 1\\nclass A:\\n    def f(self):\\n        return x\\n", "python")
        ['def f(self):\\n    return x']
    """
    name = resolve_language(language)
    if name == "php":
        text = text.removeprefix("<?php")
    pending = [get_parser(name).parse(text.encode()).root_node]
    functions = []
    while pending:
        node = pending.pop()
        if _is_function(node):
            functions.append(_remove_indent((node.text or b"").decode(errors="replace"), node.start_point.column))
        else:
            pending += reversed(node.children)
    return functions


def _is_function(node: Node) -> bool:
    """Whether a node defines a function; `const f = () => …` counts, as a variable set to an anonymous one."""
    if _VARIABLE_DECLARATION_PATTERN.fullmatch(node.type):
        values = [child.child_by_field_name("value") for child in node.named_children]
        return any(value is not None and _ANONYMOUS_FUNCTION_PATTERN.fullmatch(value.type) for value in values)
    return node.is_named and _FUNCTION_PATTERN.fullmatch(node.type) is not None


def _remove_indent(text: str, indent: int) -> str:
    """Remove `indent` columns from all lines but the first, from lines that are indented that far."""
    first, *rest = text.split("\n")
    return "\n".join([first, *(line[indent:] if not line[:indent].strip() else line for line in rest)])


def _parse_wrapped(text: str, language: str, prefix: str, suffix: str) -> ParsedSource:
    """Parse the text between a prefix and a suffix, and keep the lexemes of the text itself."""
    wrapped = f"{prefix}{text}{suffix}"
    root = get_parser(language).parse(wrapped.encode()).root_node
    character_indices = _map_bytes_to_characters(wrapped)
    lexemes = [
        Lexeme(start, stop, _classify_leaf(leaf, language), _find_syntax_part(leaf))
        for leaf in iter_leaves(root)
        if (start := character_indices[leaf.start_byte] - len(prefix)) >= 0
        and (stop := character_indices[leaf.end_byte] - len(prefix)) <= len(text)
        and start < stop
    ]
    return ParsedSource(text, language, tuple(lexemes), root.has_error)


@cache
def get_parser(language: str) -> Parser:
    """Load the tree-sitter parser of a language, cached.

    Raises:
        InputError: tree-sitter or the grammar is not installed.
    """
    try:
        tree_sitter = import_module("tree_sitter")
        package, function = GRAMMARS[language]
        grammar = getattr(import_module(package), function)()
    except ImportError as error:
        raise InputError(f"syntax needs tree-sitter ({error}): pip install 'clearhead[code]'") from error
    parser: Parser = tree_sitter.Parser(tree_sitter.Language(grammar))
    return parser


def iter_leaves(node: Node) -> Iterator[Node]:
    """Iterate over the leaves from left to right, without recursion: real code nests deeper than Python's stack."""
    pending = [node]
    while pending:
        current = pending.pop()
        if current.child_count:
            pending += reversed(current.children)
        else:
            yield current


def _map_bytes_to_characters(text: str) -> list[int]:
    """Map each byte offset of the UTF-8 text, including its end, to a character index."""
    indices = [index for index, character in enumerate(text) for _ in range(len(character.encode()))]
    return [*indices, len(text)]


def _classify_leaf(leaf: Node, language: str) -> str:
    """Return the token class of a leaf."""
    node_type = leaf.type
    leaf_text = (leaf.text or b"").decode(errors="replace")
    parent_type = leaf.parent.type if leaf.parent is not None else ""
    if "comment" in node_type or "comment" in parent_type or _is_docstring(leaf):
        return "comment"
    if node_type.lower() in _CONSTANTS or (not leaf.is_named and parent_type.lower() in _CONSTANTS):
        return "constant"
    if _STRING_PATTERN.search(node_type) or (
        _STRING_PATTERN.search(parent_type)
        and parent_type not in _STRING_INTERPOLATION_TYPES
        and node_type not in _STRING_INTERPOLATION_TYPES
    ):
        return "string"
    if (
        node_type in _TYPES
        or parent_type in _TYPES
        or (node_type == "type_identifier" and language == "go" and _GO_TYPE_PATTERN.fullmatch(leaf_text))
    ):
        return "type"
    if leaf.is_named:
        return "number" if _NUMBER_PATTERN.search(node_type) else "identifier"
    if leaf_text == "@" and any(name in parent_type for name in ("annotation", "decorator")):
        return "annotation"
    if leaf_text == "$" and parent_type == "variable_name":
        return "identifier"
    if leaf_text[:1].isalpha():
        return "modifier" if leaf_text in _MODIFIERS else "keyword"
    if leaf_text in _SEPARATORS or parent_type == "block_parameters":
        return "separator"
    return "operator"


def _is_docstring(leaf: Node) -> bool:
    """Check whether the leaf belongs to a string that is a statement by itself, as Python docstrings are."""
    string = leaf.parent
    if string is None or string.type != "string" or string.parent is None:
        return False
    return string.parent.type == "expression_statement" and string.parent.child_count == 1


def _find_syntax_part(leaf: Node) -> str:
    """Return the part of the innermost node whose head contains the leaf."""
    if _is_docstring(leaf):
        return "comment"
    node: Node | None = leaf if leaf.is_named else leaf.parent
    while node is not None and node.parent is not None:
        for part_name, pattern in _SYNTAX_PART_PATTERNS:
            if pattern.fullmatch(node.type):
                return part_name
        if _BODY_PATTERN.fullmatch(node.type) and not _is_body_delimiter(leaf, node):
            return "statement"
        node = node.parent
    return "statement"


def _is_body_delimiter(leaf: Node, body: Node) -> bool:
    """Check for braces (`end` in Ruby) around a body, which belong to the head that opens it."""
    return not leaf.is_named and leaf.parent == body and (leaf.text or b"") in (b"{", b"}", b"end", b"do")


# -- alignment with the model's tokens


@dataclass(frozen=True)
class TokenSyntax:
    """The class and the part of each unit of a model's input.

    Attributes:
        token_classes: The class of each unit.
        syntax_parts: The part of the tree of each unit.
    """

    token_classes: tuple[str, ...]
    syntax_parts: tuple[str, ...]

    def get_labels(self, grouping: str) -> tuple[str, ...]:
        """Return the labels of one grouping, "class" or "part".

        Raises:
            InputError: The grouping is unknown.
        """
        if grouping == "class":
            return self.token_classes
        if grouping == "part":
            return self.syntax_parts
        raise unknown_value_error("syntax grouping", grouping, ("class", "part"))


def align_syntax(units: Units, sources: Sequence[ParsedSource]) -> TokenSyntax:
    """Label each unit by the lexeme that covers most of its characters, white space not counted.

    Units of white space alone are "layout"; special tokens other than the mask are "special".

    Args:
        units: Units of a tokenized input, with character offsets.
        sources: Parses of the input's texts.

    Raises:
        InputError: The units have no offsets, or there are fewer sources than texts.
    """
    if units.offsets is None:
        raise InputError("syntax is aligned by characters: pass texts, and load the model with a fast tokenizer")
    segments = units.segments or (0,) * len(units)
    if max(segments) >= len(sources):
        raise InputError(f"the input has {max(segments) + 1} texts, but {len(sources)} were parsed")
    lexeme_maps = [_map_characters_to_lexemes(source) for source in sources]
    token_classes = []
    syntax_parts = []
    for unit_index, (segment, (start, stop)) in enumerate(zip(segments, units.offsets, strict=True)):
        text = sources[segment].text
        candidates = [lexeme_maps[segment][index] for index in range(start, stop) if not text[index].isspace()]
        lexemes = [lexeme for lexeme in candidates if lexeme is not None]
        is_mask = any(lexeme.token_class == "mask" for lexeme in lexemes)
        if units.special[unit_index] and not is_mask:
            token_classes.append("special")
            syntax_parts.append("special")
        elif not lexemes:
            token_classes.append("layout")
            syntax_parts.append("layout")
        else:
            majority = max(dict.fromkeys(lexemes), key=lexemes.count)
            token_classes.append(majority.token_class)
            syntax_parts.append(majority.syntax_part)
    return TokenSyntax(tuple(token_classes), tuple(syntax_parts))


def _map_characters_to_lexemes(source: ParsedSource) -> list[Lexeme | None]:
    """Map each character of the text to the lexeme that covers it."""
    lexemes: list[Lexeme | None] = [None] * len(source.text)
    for lexeme in source.lexemes:
        for index in range(lexeme.start, min(lexeme.stop, len(lexemes))):
            lexemes[index] = lexeme
    return lexemes
