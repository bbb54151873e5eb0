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

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "attngen"
# The stages, each with the values it passes on; a module may import what stands before it.
STAGES = (
    *("text", "errors", "file_lock", "files", "values", "toml_text", "spec_tables", "spec"),
    *("features", "problem", "resolve", "variants", "arch.base"),
    *("arch.sm90", "arch.sm90_bwd", "arch.sm90_decode", "arch.sm90_mask", "arch.sm90_short"),
    "arch.sm90_varlen",
    *("tuned", "plan", "program", "render", "render_bwd", "render_decode", "render_mask"),
    *("render_varlen", "toolchain", "compile", "digest", "trust", "program_check"),
    *("cache_entry", "cache_lock", "cache", "bundle", "mounts", "builder", "batch", "ops"),
    *("bench", "tune", "bundle_write", "bundle_wheel", "presets", "cli_output", "cli_build"),
    *("cli_bundle", "cli_measure", "cli"),
)
COMPILER_SIDE = {
    *("spec", "features", "resolve", "variants", "plan", "render", "render_bwd", "render_decode"),
    *("render_mask", "render_varlen", "compile", "builder", "digest"),
}
LAUNCH_SIDE = (
    *("launch", "load", "program", "program_check", "geometry", "counters", "run_time", "tracing"),
)
# Outside package → the modules (or packages of ours) that may import it.
HOMES = {
    "torch": {"ops", "reference", "tune", "bench"},
    "jax": {"jax", "ops.jax"},
    "jinja2": {"render"},
    "click": {"cli", "cli_build", "cli_bundle", "cli_measure", "cli_output"},
    "matplotlib": {"bench.plot"},
    "cuda": {"compile", "doctor", "load", "launch"},
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
    assert {"attngen.errors", "attngen.files"} <= imports("compile")
    assert "problem" in own_imports("arch.sm90") and "arch.base" in own_imports("arch.sm90")
    assert "cache" in own_imports("cli"), "an import inside a function counts"
    assert "torch" not in imports("results"), "an import for types alone does not"


@pytest.mark.parametrize("stage", STAGES)
def test_stage_imports_no_later_stage(stage: str) -> None:
    later = set(STAGES[STAGES.index(stage) + 1 :])
    mine = [module for module in modules() if belongs_to(module, {stage})]
    assert mine, f"{stage} is gone: take it out of STAGES"
    for module in mine:
        back = {name for name in own_imports(module) if belongs_to(name, later - {module})}
        assert not back, f"{module} imports {back}, which come after it"


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {module: own_imports(module) for module in modules() if module}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", LAUNCH_SIDE)
def test_launch_side_reaches_nothing_that_makes_kernels(module: str) -> None:
    assert not reached_from(module) & COMPILER_SIDE


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
        "import attngen.batch, attngen; from attngen import __all__;"
        "print(*(name for name in __all__ if not callable(getattr(attngen, name))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []
