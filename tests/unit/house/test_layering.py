"""Imports run one way: no stage imports a later one, and heavy packages stay where they belong."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "attngen"
# Packages and root modules, lowest first: one may import what stands before it, and itself.
LAYERS = (
    *("errors", "results", "io", "targets", "fragments", "spec", "runtime", "kernels", "ship"),
    *("compiler", "call", "reference", "frontends", "bench", "cli"),
)
# Of packages that hold both what makes kernels and what only names them.
COMPILER_SIDE = {
    *("spec.attention_spec", "fragments.features", "spec.resolve", "spec.variants"),
    *("kernels.plan", "kernels.fill", "compiler.compile", "compiler.builder", "compiler.digest"),
}
LAUNCH_SIDE = ("runtime",)
MOST_PACKAGES = 25  # with the modules at the root
# Outside package → the modules (or packages of ours) that may import it.
HOMES = {
    "torch": {"frontends", "reference", "bench"},
    "jax": {"frontends.jax"},
    "jinja2": {"kernels.fill"},
    "click": {"cli"},
    "matplotlib": {"bench.plot"},
    "cuda": {"compiler.compile", "cli.doctor", "runtime.load", "runtime.launch"},
}


@cache
def modules() -> dict[str, Path]:
    """Module name without `attngen.` → file; the package itself is ``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str) -> set[str]:
    """Absolute names of what a module imports anywhere in it, types alone left out."""
    path = modules()[module]
    return set(_imports_of(ast.parse(path.read_text()).body, module, path.stem == "__init__"))


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


def own_imports(module: str) -> set[str]:
    """The modules of attngen that a module imports."""
    names = {name.removeprefix("attngen.") for name in imports(module) if "attngen." in name}
    return (names & modules().keys()) - {module, ""}


def belongs_to(module: str, homes: set[str]) -> bool:
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


def test_imports_relative_and_absolute_are_both_seen() -> None:
    assert {"attngen.errors", "attngen.io.files"} <= imports("compiler.compile")
    assert {"spec.problem", "kernels.base"} <= own_imports("kernels.wgmma.forward.plans")
    assert "compiler.cache" in own_imports("cli.main"), "an import inside a function counts"
    assert "torch" not in imports("results"), "an import for types alone does not"


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_nothing_above_it(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    mine = [module for module in modules() if belongs_to(module, {layer})]
    assert mine, f"{layer} is gone: take it out of LAYERS"
    for module in mine:
        upwards = {name for name in own_imports(module) if belongs_to(name, above)}
        assert not upwards, f"{module} imports {upwards}, which lie above it"


def test_every_package_has_a_layer_and_there_are_few() -> None:
    root = {module.partition(".")[0] for module in modules()} - {"", "__main__"}
    assert root == set(LAYERS)
    packages = {module for module, path in modules().items() if path.stem == "__init__"}
    assert len(packages | root | {"__main__"}) <= MOST_PACKAGES


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {module: own_imports(module) for module in modules() if module}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", LAUNCH_SIDE)
def test_launch_side_reaches_nothing_that_makes_kernels(package: str) -> None:
    mine = [module for module in modules() if belongs_to(module, {package})]
    reached = set().union(*map(reached_from, mine))
    assert not reached & COMPILER_SIDE


@pytest.mark.parametrize("package", HOMES)
def test_package_is_imported_only_at_home(package: str) -> None:
    users = {
        module
        for module in modules()
        if any(name == package or name.startswith(f"{package}.") for name in imports(module))
    }
    strangers = {module for module in users if not belongs_to(module, HOMES[package])}
    assert not strangers, f"{package} belongs to {HOMES[package]}"


def test_import_attngen_loads_nothing_heavy() -> None:
    code = "import sys, attngen; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = set(done.stdout.split())
    assert "attngen" in loaded
    assert not loaded & {"torch", "jinja2", "cuda", "click", "numpy", "cuda.bindings.nvrtc"}


def test_public_names_are_listed_before_they_load() -> None:
    code = "import attngen; print(*({*attngen.__all__} - {*dir(attngen)}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []


def test_public_names_stay_callable_after_their_modules_are_imported() -> None:
    code = (
        "import attngen.compiler.batch, attngen; from attngen import __all__;"
        "print(*(name for name in __all__ if not callable(getattr(attngen, name))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []
