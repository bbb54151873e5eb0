"""Cache keys: the same for the same kernel wherever it is built, another for any other kernel."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attngen import compile as compiler
from attngen import digest, files
from attngen.digest import cache_key, digest_files, read_tree
from attngen.plan import plan
from tests.cpu.cache_kit import ARCH, PROBLEM, ROOT

PLAN = plan(PROBLEM, ARCH)
KEY_OF_CHECKOUT = """
import sys; sys.path.insert(0, sys.argv[1])
from attngen import digest, files, plan, problem, values
assert str(files.templates_dir()).startswith(sys.argv[1])
wanted = values.from_json(problem.Problem, sys.argv[2])
key = digest.cache_key(wanted, plan.plan(wanted, "sm_90a"), "sm_90a")
print(key.digest, key.material)
assert not {"jinja2", "cuda", "attngen.render"} & sys.modules.keys()
"""


def key_in(checkout: Path, **environment: str) -> tuple[str, dict[str, Any]]:
    """Digest and material of the key of PROBLEM, as a copy of the checkout finds it."""
    arguments = [str(checkout), digest.to_json(PROBLEM)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", KEY_OF_CHECKOUT, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=checkout,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found, _, material = done.stdout.strip().partition(" ")
    return found, json.loads(material)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package and its templates somewhere else."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("attngen", "templates"):
        shutil.copytree(ROOT / name, tmp_path / "else where" / name, ignore=ignore)
    return tmp_path / "else where"


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_key_same_problem_twice_is_equal() -> None:
    assert cache_key(PROBLEM, PLAN, ARCH) == cache_key(PROBLEM, PLAN, ARCH)


def test_key_other_checkout_other_hash_seed_is_equal(checkout: Path) -> None:
    mine = cache_key(PROBLEM, PLAN, ARCH).digest
    assert [key_in(checkout, PYTHONHASHSEED=seed)[0] for seed in ("1", "2")] == [mine, mine]


def test_key_other_times_and_hidden_files_is_equal(checkout: Path) -> None:
    template = next((checkout / "templates").rglob("*.j2"))
    os.utime(template, (1, 1))
    (template.parent / ".causal.cuh.j2.swp").write_text("an editor's own")
    assert key_in(checkout)[0] == cache_key(PROBLEM, PLAN, ARCH).digest


EDITS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "template byte": ("templates", lambda c: flip_byte(c / "templates/mask/causal.cuh.j2")),
    "new template": ("templates", lambda c: (c / "templates/mask/new.cuh.j2").write_text("")),
    "renamed template": (
        "templates",
        lambda c: (c / "templates/mask/causal.cuh.j2").rename(c / "templates/mask/c.cuh.j2"),
    ),
    "header byte": (
        "headers",
        lambda c: flip_byte(c / "attngen/cuda/include/attngen/context.cuh"),
    ),
    "option": ("flags", lambda c: replace_text(c / "attngen/compile.py", "c++17", "c++20")),
    "renderer": ("generator", lambda c: replace_text(c / "attngen/render.py", "64", "32")),
    "schema": (
        "schema",
        lambda c: replace_text(
            c / "attngen/program.py",
            f"SCHEMA_VERSION = {digest.SCHEMA_VERSION}",
            f"SCHEMA_VERSION = {digest.SCHEMA_VERSION + 1}",
        ),
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_key_edited_checkout_differs_in_what_was_edited(edit: str, checkout: Path) -> None:
    before, expected = key_in(checkout)
    changed, apply = EDITS[edit]
    apply(checkout)
    after, found = key_in(checkout)
    assert after != before
    differing = {name for name in expected if expected[name] != found[name]}
    assert changed in differing <= {changed, "generator"}


@pytest.mark.parametrize("name", ["SCHEMA_VERSION", "OPTIONS", "source_digests"])
def test_key_changed_ingredient_alone_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key(PROBLEM, PLAN, ARCH).digest
    others: dict[str, Any] = {
        "SCHEMA_VERSION": digest.SCHEMA_VERSION + 1,
        "OPTIONS": (*compiler.OPTIONS, "--use_fast_math"),
        "source_digests": lambda: {"templates": "", "headers": "", "generator": ""},
    }
    monkeypatch.setattr(digest, name, others[name])
    assert cache_key(PROBLEM, PLAN, ARCH).digest != before


def variants(value: Any) -> Iterator[Any]:
    """The value with each of its leaves changed in turn."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for other in variants(getattr(value, field.name)):
                yield dataclasses.replace(value, **{field.name: other})
    elif isinstance(value, tuple):
        yield (*value, "more")
        for index, item in enumerate(value):
            for other in variants(item):
                yield (*value[:index], other, *value[index + 1 :])
    elif isinstance(value, bool):
        yield not value
    else:
        yield value + (1 if isinstance(value, int | float) else "x")


@pytest.mark.parametrize("what", ["problem", "plan", "arch"])
def test_key_any_leaf_changed_differs_from_all_others(what: str) -> None:
    original = {"problem": PROBLEM, "plan": PLAN, "arch": ARCH}
    others = [{**original, what: other} for other in variants(original[what])]
    keys = [cache_key(**arguments).digest for arguments in [original, *others]]
    assert len(keys) == len(set(keys)) and len(keys) > 1


def test_key_material_is_readable_and_has_no_path() -> None:
    key = cache_key(PROBLEM, PLAN, ARCH)
    material = json.loads(key.material)
    assert material["problem"]["head_dim_qk"] == 64 and material["plan"]["family"] == PLAN.family
    assert material["flags"] == list(compiler.OPTIONS) and material["arch"] == ARCH
    assert key.digest == digest.digest_text(key.material) and len(key.digest) == 64
    for path in (ROOT, Path.home(), files.templates_dir(), Path(sys.prefix)):
        assert str(path) not in key.material + key.command


def test_generator_holds_every_module_that_shapes_a_kernel() -> None:
    """Whatever the renderer and the compile stage import is hashed, or is known not to matter."""
    messages_and_places = {"errors", "files"}
    values_of_the_key = {"problem", "base", "plan", "sm90_bwd", "values"}
    imported = set()
    for name in ("render.py", "render_bwd.py", "compile.py"):
        tree = ast.parse((ROOT / "attngen" / name).read_text())
        relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        imported |= {str(node.module).rpartition(".")[2] for node in relative}
    hashed = {name.removesuffix(".py") for name in digest.GENERATOR}
    assert imported - messages_and_places - values_of_the_key <= hashed


def test_digest_files_byte_moved_to_neighbour_differs() -> None:
    groups = [
        {"a": b"xy", "b": b"z"},
        {"a": b"x", "b": b"yz"},
        {"a": b"xyb", "": b"z"},
        {"ax": b"y", "b": b"z"},
        {"a": b"xy", "b": b"z", "c": b""},
        {"a": b"z", "b": b"xy"},
    ]
    assert len({digest_files(group) for group in groups}) == len(groups)
    assert digest_files({"b": b"z", "a": b"xy"}) == digest_files(groups[0])


def test_read_tree_copied_elsewhere_is_equal(tmp_path: Path) -> None:
    shutil.copytree(files.templates_dir(), tmp_path / "copy")
    tree = read_tree(tmp_path / "copy")
    assert tree == read_tree(files.templates_dir())
    assert "mask/causal.cuh.j2" in tree


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({}, None),
        ({"cuda-bindings": "13.0.1"}, None),
        ({"nvidia-cuda-nvrtc": "13.0.88"}, "13.0.88"),
        ({"nvidia-cuda-nvrtc-cu12": "12.9.86"}, "12.9.86"),
        ({"nvidia-cuda-nvrtc-cu13": "13.1.2"}, "13.1.2"),
        (
            {
                "cuda-bindings": "13.2.0",
                "nvidia-cuda-nvrtc": "13.0.88",
                "nvidia-cuda-nvrtc-cu12": "12.9.86",
            },
            "13.0.88",
        ),
        (
            {
                "cuda-bindings": "12.9.1",
                "nvidia-cuda-nvrtc": "13.0.88",
                "nvidia-cuda-nvrtc-cu12": "12.9.86",
            },
            "12.9.86",
        ),
    ],
)
def test_toolchain_is_the_installed_nvrtc_of_the_bindings_major_version(
    installed: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert digest.installed_toolchain.__wrapped__() == expected


def test_toolchain_stands_beside_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for toolchain in ("13.0.88", None):
        monkeypatch.setattr(digest, "installed_toolchain", lambda each=toolchain: each)
        keys.append(cache_key(PROBLEM, PLAN, ARCH))
    assert keys[0].digest == keys[1].digest
    assert [key.toolchain for key in keys] == ["13.0.88", None]


def test_toolchain_agrees_with_the_compiler_that_runs() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    known = digest.installed_toolchain()
    if known is None:
        pytest.skip("NVRTC is not from a wheel")
    assert compiler.toolchain() == f"nvrtc {'.'.join(known.split('.')[:2])}"
