"""Cache keys: the same for the same kernel wherever it is built, another for any other kernel."""

from __future__ import annotations

import ast
import compileall
import dataclasses
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attngen.compiler import compile as compiler
from attngen.compiler import digest, toolchain
from attngen.compiler.builder import build_plan
from attngen.compiler.cache import Cache
from attngen.compiler.digest import cache_key, digest_files, read_tree
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.plan import plan
from attngen.runtime.program import Binary
from tests.support.cache_kit import ARCH, CUBIN, PROBLEM, ROOT, make_binary

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


# ---- installs without sources


def drop_sources(package: Path) -> None:
    """Leave bytecode alone, like bundlers of applications and slim images."""
    compileall.compile_dir(package, legacy=True, quiet=1)
    for path in package.rglob("*.py"):
        path.unlink()


@pytest.mark.slow
def test_key_of_bytecode_is_one_wherever_and_whenever_it_was_compiled(
    checkout: Path, tmp_path: Path
) -> None:
    """Neither places nor times nor the order of a set are in it; code is."""
    other = tmp_path / "other" / "place"
    shutil.copytree(checkout, other)
    edited = tmp_path / "edited"
    shutil.copytree(checkout, edited)
    name, old, new = PLAN_PROPERTIES["CTAs an SM"]
    replace_text(edited / "attngen" / name, old, new)
    for path in (other / "attngen").rglob("*.py"):
        os.utime(path, (1, 1))
    for copy in (checkout, other, edited):
        drop_sources(copy / "attngen")
    found = [
        run_in(copy, DIGESTS, PYTHONHASHSEED=seed)["generator"]
        for copy, seed in ((checkout, "1"), (other, "2"), (edited, "1"))
    ]
    assert found[0] == found[1] != found[2]
    assert found[0] != digest.source_digests()["generator"]


def test_key_of_a_module_with_neither_source_nor_code_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules that are compiled to machine code have neither."""

    class Loader:
        def get_code(self, name: str) -> None:
            return None

    spec = importlib.machinery.ModuleSpec("attngen.io.values", Loader(), origin="values.so")  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(
        FileNotFoundError, match=r"attngen\.values has neither .* install attngen's"
    ):
        digest.read_module("values")


def run_from_zip(checkout: Path, tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    archive = shutil.make_archive(str(tmp_path / "app"), "zip", checkout)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": archive, "ATTNGEN_CACHE_DIR": str(tmp_path / "cache")},
        cwd=tmp_path,
    )


def test_install_in_a_zip_has_the_keys_of_a_wheel_and_says_what_building_needs(
    checkout: Path, tmp_path: Path
) -> None:
    """Its wheel says what its templates and headers are; NVRTC cannot read them there."""
    facts = {"features": features.scan(), **digest.to_data(digest.read_shipped())}
    (checkout / "attngen" / "shipped.json").write_text(digest.to_json(facts))
    done = run_from_zip(checkout, tmp_path, DIGESTS)
    assert json.loads(done.stdout) == digest.source_digests(), done.stderr
    code = "import attngen; attngen.build(attngen.AttentionSpec(head_dim=16))"
    done = run_from_zip(checkout, tmp_path, code)
    assert done.returncode and "app.zip, out of which its templates" in done.stderr
    assert "install it with pip" in done.stderr


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
    assert toolchain.packaged_toolchain.__wrapped__() == expected


def test_toolchain_stands_beside_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("13.0.88", None):
        monkeypatch.setattr(digest, "installed_toolchain", lambda each=version: each)
        keys.append(cache_key(PROBLEM, PLAN, ARCH))
    assert keys[0].digest == keys[1].digest
    assert [key.toolchain for key in keys] == ["13.0.88", None]


def test_toolchain_agrees_with_the_compiler_that_runs() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    known = digest.installed_toolchain()
    if known is None:
        pytest.skip("NVRTC is not from a wheel")
    assert compiler.toolchain() == f"nvrtc {'.'.join(known.split('.')[:2])}"


LABELS = {  # version that the library says it has, its file → its label, beside package 13.0.88
    "the package's": ((13, 0), "/site/nvidia/cu13/lib/libnvrtc.so.13", "13.0.88"),
    "of an unknown place": ((13, 0), None, "13.0.88"),
    "of a toolkit": ((13, 1), "/usr/local/cuda/lib64/libnvrtc.so.13.1.80", "13.1.80"),
    "of a toolkit of that version": ((13, 0), "/opt/libnvrtc.so.13.0.48", "13.0.48"),
    "of a file without a version": ((13, 0), "/opt/libnvrtc.so.13", "13.0"),
    "newer under the package's place": ((13, 2), "/site/nvidia/lib/libnvrtc.so.13", "13.2"),
    "with a file's name that lies": ((13, 1), "/opt/libnvrtc.so.13.0.48", "13.1"),
}


@pytest.mark.parametrize("which", LABELS)
def test_toolchain_label_is_that_of_the_library_that_is_loaded(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, file, label = LABELS[which]
    packages = {"cuda-bindings": "13.0.1", "nvidia-cuda-nvrtc": "13.0.88"}
    monkeypatch.setattr(toolchain, "_version", packages.get)
    place = SimpleNamespace(locate_file=lambda name: f"/site/{name}")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: place)
    monkeypatch.setattr(toolchain, "mapped_file", lambda name: file)
    monkeypatch.setattr(toolchain, "_loaded", None)
    toolchain.note_loaded(*version)
    assert toolchain.installed_toolchain() == label


def test_build_stores_under_the_library_that_is_loaded_and_finds_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package's metadata name another version than the library that was found."""
    monkeypatch.setattr(toolchain, "packaged_toolchain", lambda: "13.9.1")
    monkeypatch.setattr(toolchain, "_loaded", None)
    compiled = []

    def compile_source(*_: object) -> tuple[Binary, bytes]:
        compiled.append(1)
        return make_binary(), CUBIN

    monkeypatch.setattr(compiler, "compile_source", compile_source)
    monkeypatch.setattr(compiler, "load_toolchain", lambda: "13.0.48")
    cache = Cache(tmp_path / "cache")
    for _ in range(2):
        build_plan(PROBLEM, PLAN, ARCH, cache=cache)
    assert [entry.toolchain for entry in cache.entries()] == ["13.0.48"] and len(compiled) == 1
