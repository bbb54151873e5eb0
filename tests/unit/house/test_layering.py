"""Imports run one way: no stage imports a later one, and heavy packages stay where they belong."""

from __future__ import annotations

import graphlib
import subprocess
import sys

import pytest

from tests.support.exceptions import check
from tests.support.import_graph import (
    belongs_to,
    children,
    crosses,
    imports,
    imports_by_name,
    modules,
    own_imports,
    reached_from,
)
from tests.support.paths import ROOT

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
MOST_PACKAGES = 25  # with the modules at the root, but for a folder a kernel family and a front end
# Outside package → the modules (or packages of ours) that may import it.
HOMES = {
    "torch": {"frontends", "reference", "bench"},
    "jax": {"frontends.jax", "bench.in_jax"},
    "flax": {"frontends.jax.flax"},
    "transformers": {
        *("frontends.integrations.mask_plan", "frontends.integrations.paged"),
        "frontends.integrations.transformers",
    },
    "jinja2": {"kernels.fill"},
    "click": {"cli"},
    "matplotlib": {"bench.plot"},
    "cuda": {"compiler.compile", "cli.doctor", "runtime.load", "runtime.launch", "bench.energy"},
}

# Packages that import no framework, at once or in a call, nor anything that does.
FREE_OF_FRAMEWORKS = ("targets", "fragments", "spec", "runtime", "kernels", "call")
FRAMEWORKS = {"torch", "jax", "flax"}


def test_imports_relative_and_absolute_are_both_seen() -> None:
    assert {"attngen.errors", "attngen.io.files"} <= imports("compiler.compile")
    assert {"spec.problem", "kernels.base"} <= own_imports("kernels.wgmma.forward.feasible")
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
    shared = (packages | root | {"__main__"}) - families() - children("frontends")
    assert len(shared) <= MOST_PACKAGES


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


@pytest.mark.parametrize("package", FREE_OF_FRAMEWORKS)
def test_package_reaches_no_framework(package: str) -> None:
    mine = [module for module in modules() if belongs_to(module, {package})]
    assert mine, f"{package} is gone: take it out of FREE_OF_FRAMEWORKS"
    for module in set().union(*map(reached_from, mine)):
        names = {name.partition(".")[0] for name in imports(module) | imports_by_name(module)}
        assert not names & FRAMEWORKS, f"{module} imports {names & FRAMEWORKS}"


def test_import_by_name_is_seen() -> None:
    assert "flash_attn_interface" in imports_by_name("bench.peers")


def families() -> set[str]:
    """Packages of kernel families, of whatever instruction."""
    instructions = children("kernels") - {"kernels.support"}
    return {family for each in instructions for family in children(each)}


def test_kernel_families_do_not_import_each_other() -> None:
    """Code that families of one instruction share lies beside them; support/ is of none."""
    found = families()
    assert len(found) > 3
    crossing = {
        f"{family} imports {other}"
        for family in found | {"kernels.support"}
        for other in found - {family}
        if crosses(family, other)
    }
    check("families", crossing)


def test_front_ends_do_not_import_each_other() -> None:
    """One that speaks another library's words builds on attngen's public names."""
    ends = children("frontends")
    assert "frontends.pytorch" in ends
    assert not [(one, two) for one in ends for two in ends - {one} if crosses(one, two)]


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


@pytest.mark.slow
def test_public_names_stay_callable_after_their_modules_are_imported() -> None:
    code = (
        "import attngen.compiler.batch, attngen; from attngen import __all__;"
        "print(*(name for name in __all__ if not callable(getattr(attngen, name))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []
