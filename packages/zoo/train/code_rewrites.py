"""Python functions in other words: rewritten so that they do the same, or changed a little so that they do not.

Rewriting trusts that operators mean what they usually do (`a < b` is `b > a`); a class may define them otherwise.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Sequence

#: Functions that look at their own names cannot be renamed.
LOOK_AT_NAMES = {"locals", "globals", "eval", "exec", "vars", "super"}
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
}
CONFUSED: dict[type[ast.AST], type[ast.AST]] = {
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


def plain(text: str) -> ast.FunctionDef | None:
    """The function without docstring, comments and annotations; none where renaming would change what it does."""
    try:
        function = ast.parse(text).body[0]
    except (SyntaxError, IndexError):
        return None
    if not isinstance(function, ast.FunctionDef):
        return None
    if any(isinstance(node, ast.Global | ast.Nonlocal | ast.ClassDef) for node in ast.walk(function)):
        return None
    if names_of(function) & LOOK_AT_NAMES:
        return None
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return function if len(function.body) > 1 or any(map(is_long, function.body)) else None


def is_long(statement: ast.stmt) -> bool:
    return sum(1 for _ in ast.walk(statement)) > 12


def names_of(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def own_names(function: ast.FunctionDef) -> list[str]:
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
            function = plain(text)
            if function is not None:
                names |= dict.fromkeys([function.name, *own_names(function)])
        self.names = list(names)

    def rewritten(self, function: ast.FunctionDef) -> str:
        made = copy.deepcopy(function)
        new = self.new_names(made)
        for node in ast.walk(made):
            if isinstance(node, ast.Name):
                node.id = new.get(node.id, node.id)
            elif isinstance(node, ast.arg):
                node.arg, node.annotation = new.get(node.arg, node.arg), None
            elif isinstance(node, ast.ExceptHandler | ast.FunctionDef) and node.name:
                node.name = new.get(node.name, node.name)
        made.name = self.random.choice(self.names)
        return ast.unparse(ast.fix_missing_locations(SameMeaning(self.random).visit(made)))

    def new_names(self, function: ast.FunctionDef) -> dict[str, str]:
        own = own_names(function)
        taken = names_of(function) | set(own)
        drawn = self.random.sample(self.names, min(len(self.names), 4 * len(own) + 20))
        return dict(zip(own, (name for name in drawn if name not in taken), strict=False))

    def mutant(self, function: ast.FunctionDef) -> ast.FunctionDef | None:
        """The function with one thing in it changed; none where there is nothing to change."""
        made = copy.deepcopy(function)
        places = [place for statement in made.body for place in changeable(statement)]
        if not places:
            return None
        change(self.random.choice(places))
        return made


class SameMeaning(ast.NodeTransformer):
    """Each rewriting at half of the places where it fits."""

    def __init__(self, generator: random.Random) -> None:
        self.random = generator

    def often(self) -> bool:
        return self.random.random() < 0.5

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        flipped = FLIPPED.get(type(node.ops[0]))
        if len(node.ops) == 1 and flipped is not None and self.often():
            return ast.Compare(node.comparators[0], [flipped()], [node.left])
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and self.often():
            before = ast.Name(node.target.id, ast.Load())
            return ast.Assign([node.target], ast.BinOp(before, node.op, node.value))
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        chained = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        if node.orelse and not chained and self.often():
            return ast.If(opposite(node.test), node.orelse, node.body)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return ast.IfExp(opposite(node.test), node.orelse, node.body) if self.often() else node

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call | ast.BinOp) and self.often():
            name = self.random.choice(("result", "answer", "value", "found"))
            return [ast.Assign([ast.Name(name, ast.Store())], node.value), ast.Return(ast.Name(name, ast.Load()))]
        return node


def opposite(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def changeable(tree: ast.AST) -> list[ast.AST]:
    return [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Compare) and type(node.ops[0]) in CONFUSED)
        or (isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in CONFUSED)
        or (isinstance(node, ast.Constant) and isinstance(node.value, int))
        or (isinstance(node, ast.Call) and len(node.args) > 1 and ast.dump(node.args[0]) != ast.dump(node.args[1]))
        or (isinstance(node, ast.If) and not node.orelse)
    ]


def change(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = CONFUSED[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        node.op = CONFUSED[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(node.value) + 1  # type: ignore[arg-type]
    elif isinstance(node, ast.Call):
        node.args[0], node.args[1] = node.args[1], node.args[0]
    elif isinstance(node, ast.If):
        node.test = opposite(node.test)
