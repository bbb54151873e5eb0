"""Imports between the modules of attngen, read from their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "attngen"


@cache
def modules() -> dict[str, Path]:
    """Module name without `attngen.` → file; the package itself is ``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Absolute names of what a module imports anywhere in it, types alone left out."""
    path = modules()[module]
    return frozenset(_imports_of(ast.parse(path.read_text()).body, module, path.stem == "__init__"))


def _imports_of(body: list[ast.stmt], module: str, is_package: bool) -> Iterator[str]:
    for node in _reachable(body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["attngen", *filter(None, module.split("."))]
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *filter(None, [base])])
            for name in (f"{base}.{alias.name}" for alias in node.names):
                yield name if name.removeprefix("attngen.") in modules() else base


def _reachable(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        for _, value in ast.iter_fields(statement):
            if isinstance(value, list):
                yield from _reachable([item for item in value if isinstance(item, ast.stmt)])
                handlers = [item for item in value if isinstance(item, ast.ExceptHandler)]
                for handler in handlers:
                    yield from _reachable(handler.body)


@cache
def own_imports(module: str) -> set[str]:
    """The modules of attngen that a module imports."""
    names = {name.removeprefix("attngen.") for name in imports(module) if "attngen." in name}
    return (names & modules().keys()) - {module, ""}


def imports_by_name(module: str) -> set[str]:
    """Names that a module hands to `import_module` or `__import__` as constants."""
    tree = ast.parse(modules()[module].read_text())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    given = {
        call.args[0]
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] in ("import_module", "__import__")
    }
    return {name.value for name in given if isinstance(name, ast.Constant)}


def children(package: str) -> set[str]:
    """The packages directly inside a package."""
    inside = {name for name, path in modules().items() if path.stem == "__init__"}
    return {name for name in inside if name.rpartition(".")[0] == package}


def crosses(package: str, other: str) -> bool:
    """Whether a module of a package imports one of another package."""
    mine = [module for module in modules() if belongs_to(module, {package})]
    return any(belongs_to(name, {other}) for module in mine for name in own_imports(module))


def belongs_to(module: str, homes: set[str]) -> bool:
    """Whether a module is one of these packages or lies in one."""
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def reached_from(module: str) -> set[str]:
    """Everything of attngen that importing the module brings along, at once or in a call."""
    seen: set[str] = set()
    pending = [module]
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            pending += own_imports(current)
    return seen
