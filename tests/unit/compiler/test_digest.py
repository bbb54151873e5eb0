"""Cache keys: the same for the same kernel wherever it is built, another for any other kernel."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attngen.compiler import compile as compiler
from attngen.compiler import digest
from attngen.compiler.digest import cache_key, digest_files, read_tree
from attngen.io import files
from attngen.kernels.plan import plan
from tests.support.cache_kit import ARCH, PROBLEM, ROOT

PLAN = plan(PROBLEM, ARCH)
KEY_OF_CHECKOUT = """
import sys; sys.path.insert(0, sys.argv[1])
from attngen.compiler import digest
from attngen.io import files
from attngen.kernels import plan
from attngen.spec import problem
from attngen.io import values
assert str(files.templates_dir()).startswith(sys.argv[1])
wanted = values.from_json(problem.Problem, sys.argv[2])
key = digest.cache_key(wanted, plan.plan(wanted, "sm_90a"), "sm_90a")
print(key.digest, key.material)
assert not {"jinja2", "cuda", "attngen.kernels.fill"} & sys.modules.keys()
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


def copy_checkout(folder: Path) -> Path:
    """A copy of the package and its templates in a folder."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("attngen", "templates"):
        shutil.copytree(ROOT / name, folder / "else where" / name, ignore=ignore)
    return folder / "else where"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package and its templates somewhere else."""
    return copy_checkout(tmp_path)


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


SHARED = "mma/wgmma.cuh.j2"  # of every kernel
EDITS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "fragment byte": ("fragments", lambda c: flip_byte(c / "templates/mask/causal.cuh.j2")),
    "template byte": ("templates", lambda c: flip_byte(c / "templates" / SHARED)),
    "new template": ("templates", lambda c: (c / "templates/mma/new.cuh.j2").write_text("")),
    "renamed template": (
        "templates",
        lambda c: (c / "templates" / SHARED).rename(c / "templates/mma/c.cuh.j2"),
    ),
    "header byte": (
        "headers",
        lambda c: flip_byte(c / "attngen/cuda/include/attngen/context.cuh"),
    ),
    "option": (
        "flags",
        lambda c: replace_text(c / "attngen/compiler/compile.py", "c++17", "c++20"),
    ),
    "renderer": ("generator", lambda c: replace_text(c / "attngen/kernels/params.py", "64", "32")),
    "schema": (
        "schema",
        lambda c: replace_text(
            c / "attngen/runtime/program.py",
            f"SCHEMA_VERSION = {digest.SCHEMA_VERSION}",
            f"SCHEMA_VERSION = {digest.SCHEMA_VERSION + 1}",
        ),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("edit", EDITS)
def test_key_edited_checkout_differs_in_what_was_edited(edit: str, checkout: Path) -> None:
    before, expected = key_in(checkout)
    changed, apply = EDITS[edit]
    apply(checkout)
    after, found = key_in(checkout)
    assert after != before
    differing = {name for name in expected if expected[name] != found[name]}
    assert changed in differing <= {changed, "generator"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "edit",
    [
        lambda c: (c / "templates/mask/new.cuh.j2").write_text(""),
        lambda c: flip_byte(c / "templates/mask/window.cuh.j2"),
        lambda c: (c / "templates/score/softcap.cuh.j2").unlink(),
    ],
    ids=("new", "edited", "gone"),
)
def test_key_of_kernels_without_a_fragment_is_not_changed_by_it(
    edit: Callable[[Path], object], checkout: Path
) -> None:
    assert "window" not in PROBLEM.masks and not PROBLEM.scores
    before = key_in(checkout)
    edit(checkout)
    assert key_in(checkout) == before


def test_key_names_the_fragments_of_its_problem() -> None:
    material = json.loads(cache_key(PROBLEM, PLAN, ARCH).material)
    used = {f"{axis}/{name}.cuh.j2" for axis, name in PROBLEM.fragments}
    assert material["fragments"].keys() == used
    for file, found in material["fragments"].items():
        assert found == hashlib.sha256((ROOT / "templates" / file).read_bytes()).hexdigest()
    gone = dataclasses.replace(PROBLEM, masks=("gone",))
    material = json.loads(cache_key(gone, PLAN, ARCH).material)
    assert material["fragments"]["mask/gone.cuh.j2"] is None


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
    elif value is None:
        yield "something"
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


def path_of(module: str) -> Path:
    """The source of a module of attngen, or of a package's own."""
    path = ROOT / "attngen" / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported_by(module: str) -> set[str]:
    """The modules of attngen that a module imports when it is imported itself."""
    path = path_of(module)
    package = [*module.split("."), ""] if path.stem == "__init__" else module.split(".")
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: -node.level], *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)}
    return {name for name in found if name and path_of(name).is_file()}


# What generators import and does not shape a kernel: reasons, places, what a key has beside its
# digest, and the choice of a problem and its plan, which are in the key themselves.
SHAPES_NOTHING = {"errors", "io.text", "io.file_lock", "io.modules", "compiler.toolchain"}
CHOOSES = {"spec.attention_spec", "spec.tables", "io.toml_text", "spec.layouts", "spec.plain"}
CHOOSES |= {"spec.masks", "spec.call_arguments", "spec.functions", *digest.CHOOSES}


def test_generator_holds_every_module_that_shapes_a_kernel() -> None:
    renderers = {name for name in digest.GENERATOR if name.startswith("kernels.")}
    pending, reached = (
        [*renderers, "compiler.compile", "runtime.geometry", "runtime.parameters"],
        set(),
    )
    while pending:
        module = pending.pop()
        if module not in reached:
            reached.add(module)
            pending += imported_by(module)
    assert {"kernels.base", "spec.problem", "runtime.program", "targets.target"} <= reached
    packages = {name for name in reached if path_of(name).stem == "__init__"}
    assert reached - packages - SHAPES_NOTHING - CHOOSES <= {*digest.GENERATOR}
    assert not (SHAPES_NOTHING | CHOOSES) & {*digest.GENERATOR}
    folder = ROOT / "attngen" / "kernels"
    parts = (
        path.relative_to(ROOT / "attngen").with_suffix("").parts for path in folder.rglob("*.py")
    )
    modules = {".".join(each).removesuffix(".__init__") for each in parts}
    assert modules - CHOOSES <= {*digest.GENERATOR}, "a kernel may come of it"


# Each module in turn has a comment more, and the digests are those of a process that begins then.
EDIT_EACH = """
import importlib, json, sys
from pathlib import Path
from attngen.compiler import digest
found = []
for path in map(Path, sys.argv[1:]):
    was = path.read_bytes()
    path.write_bytes(was + b"# edited\\n")
    found.append(importlib.reload(digest).source_digests())
    path.write_bytes(was)
print(json.dumps([importlib.reload(digest).source_digests(), *found]))
"""


@pytest.fixture(scope="module")
def edited_digests(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """Digests of a copy of the checkout, and by module these with a comment more in it."""
    copy = copy_checkout(tmp_path_factory.mktemp("edited"))
    paths = [copy / path_of(name).relative_to(ROOT) for name in digest.GENERATOR]
    untouched, *found = run_in(copy, EDIT_EACH, *paths)
    return untouched, dict(zip(digest.GENERATOR, found, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", digest.GENERATOR)
def test_key_any_module_that_generates_edited_differs(
    name: str, edited_digests: tuple[Any, dict[str, Any]]
) -> None:
    """By a comment in it, which shapes nothing: bytes count."""
    before, edited = edited_digests
    assert before == digest.source_digests()
    after = edited[name]
    assert {key for key in before if before[key] != after[key]} == {"generator"}
    others = (each["generator"] for other, each in edited.items() if other != name)
    assert after["generator"] not in others


PLAN_PROPERTIES = {
    "CTAs an SM": ("kernels/wgmma/forward/plan.py", "return held // (", "return 2 * held // ("),
    "sums of dK and dV": ("kernels/wgmma/backward/plan.py", "* columns + 1)", "* columns + 2)"),
}


@pytest.mark.parametrize("what", PLAN_PROPERTIES)
def test_key_what_a_plan_computes_of_itself_is_in_it(what: str, checkout: Path) -> None:
    name, old, new = PLAN_PROPERTIES[what]
    before = key_in(checkout)[0]
    replace_text(checkout / "attngen" / name, old, new)
    assert key_in(checkout)[0] != before


DIGESTS = (
    "import json; from attngen.compiler.digest import source_digests as f; print(json.dumps(f()))"
)


def run_in(checkout: Path, code: str, *arguments: object, **environment: str) -> Any:
    """Run code in a process that has the package of a checkout; returns the JSON it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        | environment,
        cwd=checkout.parent,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
