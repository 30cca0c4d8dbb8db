"""The import contract: the allowed imports between packages, and no import cycles between modules.

A package is a set of module prefixes. Imports inside functions count, imports for type checkers only do not.
`import_violations.txt` lists the current violations and may only become shorter; `python tests/test_import_contract.py`
prints its content.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import clearhead

SOURCES = Path(__file__).parents[1] / "src"
KNOWN_VIOLATIONS = Path(__file__).with_name("import_violations.txt")

#: Package of the contract → its modules, by prefix (after `clearhead.`); the longest prefix decides.
PACKAGES: dict[str, tuple[str, ...]] = {
    "errors": ("errors",),
    "units": ("units", "sample"),
    "targets": ("targets",),
    "stats": ("stats",),
    "images": ("images",),
    "files": ("data.atomic_file",),
    "explanation": ("explanation",),
    "capture": ("capture",),
    "interventions": ("interventions",),
    "backward_rules": ("backward_rules",),
    "perturbation": ("perturbation",),
    "methods": ("methods",),
    "profiles": ("profiles",),
    "adapters": ("adapters",),
    "engine": ("engine", "explainer", "request"),
    "render": ("render",),
    "bench": ("bench",),
    "probes": ("probes",),
    "concepts": ("concepts",),
    "studies": ("studies",),
    "web": ("web",),
    "cli": ("cli",),
}
_BASE = ("errors", "units", "targets", "stats", "images", "files")
_CLIENTS = ("bench", "probes", "concepts", "studies", "web", "cli")
_INTERNAL = (
    *("capture", "interventions", "backward_rules", "perturbation", "methods", "profiles", "adapters", "engine"),
)
#: Package → the packages that it must not import. Clients may import public names (`clearhead.__all__`).
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "errors": tuple(name for name in PACKAGES if name != "errors"),
    **{name: tuple(set(PACKAGES) - {"errors", name}) for name in _BASE[1:]},
    "explanation": tuple(set(PACKAGES) - {*_BASE, "explanation"}),
    "capture": tuple(set(PACKAGES) - {"errors", "capture"}),
    "interventions": tuple(set(PACKAGES) - {"errors", "capture", "interventions"}),
    "backward_rules": tuple(set(PACKAGES) - {"errors", "capture", "backward_rules"}),
    "perturbation": ("adapters", "engine", "profiles", "render", *_CLIENTS),
    "methods": ("adapters", "engine", "profiles", "explanation", "render", *_CLIENTS),
    "profiles": ("adapters", "engine", "explanation", "render", *_CLIENTS),
    "adapters": ("engine", "profiles", "explanation", "render", *_CLIENTS),
    "engine": ("render", *_CLIENTS),
    "render": (*_INTERNAL, *_CLIENTS),
    **dict.fromkeys(_CLIENTS, _INTERNAL),
}


@cache
def find_modules() -> dict[str, Path]:
    """Return the files of all modules by name."""
    modules = {}
    for path in sorted((SOURCES / "clearhead").rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_package(module: str) -> str | None:
    """Return the target package of a module."""
    name = module.removeprefix("clearhead.") + "."
    by_prefix = {prefix: package for package, prefixes in PACKAGES.items() for prefix in prefixes}
    matches = [prefix for prefix in by_prefix if name.startswith(f"{prefix}.")]
    return by_prefix[max(matches, key=len)] if matches else None


def find_imports(statements: list[ast.stmt], at_import_time: bool = True) -> Iterator[tuple[str, str, bool]]:
    """Yield the modules that statements import, the name taken from them, and whether that runs with the module."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from ((alias.name, "", at_import_time) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.module and not statement.level, "relative imports are not followed here"
            for alias in statement.names:
                module = f"{statement.module}.{alias.name}"
                if module in find_modules():
                    yield module, "", at_import_time
                else:
                    yield statement.module, alias.name, at_import_time
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from find_imports(statement.orelse, at_import_time)
        else:
            runs_later = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from find_imports(getattr(statement, inner, []), at_import_time and not runs_later)


@cache
def find_edges() -> tuple[tuple[str, str, str, bool], ...]:
    """Return all imports inside clearhead: importing and imported module, name, and whether it is at import time."""
    return tuple(
        (importer, imported, name, at_import_time)
        for importer, path in find_modules().items()
        for imported, name, at_import_time in find_imports(ast.parse(path.read_text(encoding="utf-8")).body)
        if imported.split(".")[0] == "clearhead"
    )


def find_violations() -> set[str]:
    """Return the imports that the contract forbids."""
    return {
        f"{importer} -> {imported}"
        for importer, imported, name, _ in find_edges()
        if find_package(imported) in FORBIDDEN.get(find_package(importer) or "", ())
        and not (find_package(importer) in _CLIENTS and name in clearhead.__all__)
    }


def find_cycles() -> set[str]:
    """Return the names of the modules of each import cycle.

    Importing a module also imports its parent packages.
    """
    needs: dict[str, set[str]] = {module: set() for module in find_modules()}
    for importer, imported, _, at_import_time in find_edges():
        parts = imported.split(".")
        for stop in range(1, len(parts) + 1):
            module = ".".join(parts[:stop])
            if at_import_time and module in needs and not f"{importer}.".startswith(f"{module}."):
                needs[importer].add(module)
    for _ in range(len(needs).bit_length()):  # doubles the path length each time
        needs = {module: found.union(*(needs[other] for other in found)) for module, found in needs.items()}
    together = {module: {other for other in found if module in needs[other]} for module, found in needs.items()}
    return {"cycle: " + ", ".join(sorted(modules)) for module, modules in together.items() if module in modules}


def test_contract_violations_equal_the_known_list() -> None:
    known = set(KNOWN_VIOLATIONS.read_text(encoding="utf-8").splitlines())
    violations = find_violations() | find_cycles()
    assert not violations - known, "\n".join(["new violations of the import contract:", *sorted(violations - known)])
    fixed = known - violations
    assert not fixed, "\n".join([f"remove these lines from {KNOWN_VIOLATIONS.name}, they are fixed:", *sorted(fixed)])


def test_every_module_of_a_package_with_a_rule_exists() -> None:
    modules = {f"{module.removeprefix('clearhead.')}." for module in find_modules()}
    for prefixes in PACKAGES.values():
        for prefix in prefixes:
            assert any(module.startswith(f"{prefix}.") for module in modules), f"there is no module {prefix}"


def test_longest_prefix_determines_the_package() -> None:
    modules = ("clearhead.interventions.attention_patch", "clearhead.capture.tape", "clearhead.unitsize", "clearhead")
    assert [find_package(module) for module in modules] == ["interventions", "capture", None, None]


def test_nested_imports_are_found() -> None:
    source = """
import a
if TYPE_CHECKING:
    import b
else:
    from clearhead import errors
def function():
    try:
        import c
    except ImportError:
        from d import e
"""
    assert list(find_imports(ast.parse(source).body)) == [
        ("a", "", True),
        ("clearhead.errors", "", True),
        ("c", "", False),
        ("d", "e", False),
    ]


if __name__ == "__main__":
    print("\n".join(sorted(find_violations() | find_cycles())))
