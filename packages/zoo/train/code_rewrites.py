"""Rewrites of Python functions: equivalent versions, and versions with a small change of behaviour.

The rewrites assume that operators have their usual meaning (`a < b` is `b > a`); a class may define them differently. A
function in which a name does not always have the same meaning, or is visible from outside, is not rewritten.
"""

from __future__ import annotations

import ast
import copy
import random
import symtable
from collections.abc import Sequence, Set

#: Functions that inspect their own names cannot be renamed.
NAME_INSPECTING_BUILTINS = {"locals", "globals", "eval", "exec", "vars", "super"}
#: What a value is called on its way out.
RESULT_NAMES = ("result", "answer", "value", "found", "outcome", "output")
#: Functions that do not ask in which order their arguments come.
ORDER_FREE_CALLS = {"min", "max"}
FLIPPED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
}
MUTATED_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def parse_plain_function(text: str) -> ast.FunctionDef | None:
    """The function without docstring, comments and annotations; none where renaming would change what it does."""
    try:
        function = ast.parse(text).body[0]
    except (SyntaxError, IndexError):
        return None
    if not isinstance(function, ast.FunctionDef):
        return None
    if any(isinstance(node, ast.Global | ast.Nonlocal | ast.ClassDef) for node in ast.walk(function)):
        return None
    if collect_names(function) & NAME_INSPECTING_BUILTINS or has_unrenamable_names(function):
        return None
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return function if len(function.body) > 1 or any(map(is_long, function.body)) else None


def has_unrenamable_names(function: ast.FunctionDef) -> bool:
    """Whether some name of its own cannot be renamed by writing another wherever it stands.

    It may also mean something outside (in `def f(len=len)`, before a comprehension), be imported, be bound by a
    pattern, or be the keyword of an inner function; and the function may call itself.
    """
    own, imported, inner, keywords = set(list_bound_names(function)), set(), set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.MatchAs | ast.MatchStar | ast.MatchMapping):
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.keyword) and node.arg is not None:
            keywords.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node is not function:
            inner |= {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    loose = own & imported or inner & keywords or own & find_free_names(ast.unparse(function))
    return function.name in collect_names(function) or bool(loose)


def find_free_names(text: str) -> set[str]:
    """The names that the function, or some scope inside it, takes from outside of it."""
    parsed = ast.parse(text).body[0]
    assert isinstance(parsed, ast.FunctionDef)
    # what decorators and defaults name is looked up before there is a function
    before = [*parsed.decorator_list, *parsed.args.defaults, *(one for one in parsed.args.kw_defaults if one)]
    found = {name for tree in before for name in collect_names(tree)}
    waiting = symtable.symtable(text, "function", "exec").get_children()
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        found |= {one.get_name() for one in table.get_symbols() if one.is_global()}
    return found


def is_long(statement: ast.stmt) -> bool:
    return sum(1 for _ in ast.walk(statement)) > 12


def collect_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def list_bound_names(function: ast.FunctionDef) -> list[str]:
    """Arguments and variables that the function binds, in order; `self` and `cls` keep their names."""
    bound: dict[str, None] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            bound[node.arg] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = None
        elif isinstance(node, ast.ExceptHandler | ast.FunctionDef) and node.name and node is not function:
            bound[node.name] = None
    return [name for name in bound if name not in ("self", "cls", "_")]


class Rewriter:
    """Draws from one stream of random numbers; names come from the functions that it was shown."""

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self.random = random.Random(seed)
        names: dict[str, None] = {}
        for text in texts:
            function = parse_plain_function(text)
            if function is not None:
                names |= dict.fromkeys([function.name, *list_bound_names(function)])
        self.known_names = list(names)

    def rewrite(self, function: ast.FunctionDef) -> str:
        made = copy.deepcopy(function)
        new = self.choose_new_names(made)
        for node in ast.walk(made):
            if isinstance(node, ast.Name):
                node.id = new.get(node.id, node.id)
            elif isinstance(node, ast.arg):
                node.arg, node.annotation = new.get(node.arg, node.arg), None
            elif isinstance(node, ast.ExceptHandler | ast.FunctionDef) and node.name:
                node.name = new.get(node.name, node.name)
        taken = collect_names(made) | set(list_bound_names(made))
        made.name = self.random.choice([name for name in self.known_names if name not in taken] or [made.name])
        return ast.unparse(ast.fix_missing_locations(SemanticPreservingTransformer(self.random, taken).visit(made)))

    def choose_new_names(self, function: ast.FunctionDef) -> dict[str, str]:
        own = list_bound_names(function)
        taken = collect_names(function) | set(own)
        drawn = self.random.sample(self.known_names, min(len(self.known_names), 4 * len(own) + 20))
        return dict(zip(own, (name for name in drawn if name not in taken), strict=False))

    def mutate(self, function: ast.FunctionDef) -> ast.FunctionDef | None:
        """The function with one thing in it changed; none where there is nothing to change."""
        made = copy.deepcopy(function)
        places = [place for statement in made.body for place in find_mutable_nodes(statement)]
        if not places:
            return None
        mutate_node(self.random.choice(places))
        return made


class SemanticPreservingTransformer(ast.NodeTransformer):
    """Each rewriting at half of the places where it fits."""

    def __init__(self, generator: random.Random, taken: Set[str]) -> None:
        """taken: names that a new variable must not have."""
        self.random = generator
        self.free_names = [name for name in RESULT_NAMES if name not in taken]

    def flip_coin(self) -> bool:
        return self.random.random() < 0.5

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        flipped = FLIPPED_COMPARISONS.get(type(node.ops[0]))
        if len(node.ops) == 1 and flipped is not None and self.flip_coin():
            return ast.Compare(node.comparators[0], [flipped()], [node.left])
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        # of a list, `x += y` would also change it where others see it: only numbers and texts are added
        if isinstance(node.target, ast.Name) and isinstance(node.value, ast.Constant) and self.flip_coin():
            before = ast.Name(node.target.id, ast.Load())
            return ast.Assign([node.target], ast.BinOp(before, node.op, node.value))
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        chained = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        if node.orelse and not chained and self.flip_coin():
            return ast.If(negate_test(node.test), node.orelse, node.body)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return ast.IfExp(negate_test(node.test), node.orelse, node.body) if self.flip_coin() else node

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        if self.free_names and isinstance(node.value, ast.Call | ast.BinOp) and self.flip_coin():
            name = self.random.choice(self.free_names)
            return [ast.Assign([ast.Name(name, ast.Store())], node.value), ast.Return(ast.Name(name, ast.Load()))]
        return node


def negate_test(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def find_mutable_nodes(tree: ast.AST) -> list[ast.AST]:
    return [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Compare) and type(node.ops[0]) in MUTATED_OPERATORS)
        or (isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in MUTATED_OPERATORS)
        or (isinstance(node, ast.Constant) and isinstance(node.value, int))
        or (isinstance(node, ast.Call) and depends_on_argument_order(node))
        or (isinstance(node, ast.If) and not node.orelse)
    ]


def depends_on_argument_order(call: ast.Call) -> bool:
    """Whether its first two arguments may not change places."""
    if isinstance(call.func, ast.Name) and call.func.id in ORDER_FREE_CALLS:
        return False
    return len(call.args) > 1 and ast.dump(call.args[0]) != ast.dump(call.args[1])


def mutate_node(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = MUTATED_OPERATORS[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        node.op = MUTATED_OPERATORS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(node.value) + 1  # type: ignore[arg-type]
    elif isinstance(node, ast.Call):
        node.args[0], node.args[1] = node.args[1], node.args[0]
    elif isinstance(node, ast.If):
        node.test = negate_test(node.test)
