"""Real kernels through `build`: compiled once, then found by a machine that cannot compile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.compiler import digest
from attngen.compiler.builder import build, render_problem
from attngen.compiler.cache import Cache
from attngen.errors import CacheError
from attngen.kernels.plan import plan
from attngen.spec.attention_spec import AttentionSpec
from tests.support.cache_kit import ARCH, ROOT
from tests.support.cache_kit import PROBLEM as OTHER

pytestmark = pytest.mark.timeout(60)
SPEC = AttentionSpec(head_dim=256, mask="causal")  # of one kernel
PROBLEM = replace(OTHER, head_dim_qk=256, head_dim_v=256)

# Neither the template engine nor the compiler exists for this process; nor does torch.
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jinja2", "markupsafe", "cuda", "torch"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
import json
from attngen.compiler import digest
from attngen.spec import problem
from attngen.io import values
from attngen.compiler.builder import build_problem
from attngen.compiler.cache import Cache
from attngen.errors import CacheError
from attngen.kernels.plan import plan
wanted = values.from_json(problem.Problem, sys.argv[1])
"""
HIT = """
cache = Cache.default()
entry = cache.get(digest.cache_key(wanted, plan(wanted, "sm_90a"), "sm_90a"))
(built,) = build_problem(wanted, "sm_90a")
assert built.from_cache and entry.hit and entry.cubin == built.cubin
print(json.dumps([built.binary.cubin_sha256, len(built.cubin)]))
"""
MISS = """
try:
    build_problem(wanted, "sm_90a")
except CacheError as error:
    print(json.dumps(error.reasons))
"""
NO_COMPILER = """
digest.installed_toolchain = lambda: None
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """The default cache, empty."""
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "the cache"))
    return Cache.default()


def run_blocked(code: str, **environment: str) -> list[str]:
    """Run code in a process where nothing that compiles can be imported; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code, digest.to_json(PROBLEM)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    result: list[str] = json.loads(done.stdout)
    return result


def test_build_second_call_is_a_hit_with_equal_result(cache: Cache) -> None:
    (first,) = build(SPEC, ARCH)
    (second,) = build(SPEC, ARCH)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert (first.binary, first.cubin, first.plan) == (second.binary, second.cubin, second.plan)
    assert first.cubin.startswith(b"\x7fELF") and first.problem == PROBLEM
    (info,) = cache.entries()
    assert info.label == digest.cache_key(PROBLEM, first.plan, ARCH).label
    assert first.binary.kernel.entry.startswith(info.label)
    assert cache.verify(lambda problem, plan: render_problem(problem, plan).sha256) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("machine", ["", NO_COMPILER], ids=["same toolchain", "no compiler"])
@pytest.mark.parametrize("disabled", ["0", "1"])
def test_hit_needs_neither_templates_engine_nor_compiler(
    machine: str, disabled: str, cache: Cache
) -> None:
    (built,) = build(SPEC, ARCH)
    found = run_blocked(machine + HIT, ATTNGEN_DISABLE_JIT=disabled)
    assert found == [built.binary.cubin_sha256, len(built.cubin)]


def test_damaged_kernel_is_compiled_again_to_the_same_bytes(cache: Cache) -> None:
    (first,) = build(SPEC, ARCH)
    (info,) = cache.entries()
    cubin = info.path / "kernel.cubin"
    cubin.write_bytes(first.cubin[:-1] + bytes([first.cubin[-1] ^ 1]))
    (second,) = build(SPEC, ARCH)
    assert not second.from_cache and second.cubin == first.cubin == cubin.read_bytes()


def test_disable_jit_miss_fails_without_importing_a_compiler(cache: Cache) -> None:
    reasons = " ".join(run_blocked(MISS, ATTNGEN_DISABLE_JIT="1"))
    assert "causal_d256_bf16" in reasons and str(cache.root) in reasons
    assert not cache.root.exists()


@pytest.mark.slow
def test_disable_jit_command_of_the_error_builds_the_missing_kernel(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    with pytest.raises(CacheError) as caught:
        build(SPEC, ARCH)
    command = caught.value.reasons[-1].partition("exactly: ")[2]
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("ATTNGEN_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, timeout=60)
    (built,) = build(SPEC, ARCH, cache=cache)
    assert built.from_cache and built.plan == plan(PROBLEM, ARCH)


# As in a container of an arbitrary user: nobody knows where its home is.
NO_HOME = """
import pwd, sys
def unknown(uid): raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
import attngen, json
built = [attngen.build(attngen.AttentionSpec(head_dim=16), "sm_90a") for _ in range(2)]
print(json.dumps([[each.from_cache for each in found] for found in built]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "~/cache"])
def test_build_without_a_home_stores_nothing_and_says_so_once(
    own: str | None, tmp_path: Path
) -> None:
    places = ("HOME", "XDG_CACHE_HOME", "ATTNGEN_CACHE_DIR", "ATTNGEN_DISABLE_JIT")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"ATTNGEN_CACHE_DIR": own} if own else {})

    def run_there(code: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=environment | more,
            capture_output=True,
            text=True,
        )

    done = run_there(NO_HOME)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[False, False]] * 2
    assert done.stderr.count("kernels are not stored") == 1 and "ATTNGEN_CACHE_DIR" in done.stderr
    assert list(tmp_path.iterdir()) == [], "no folder named ~ either"
    (tmp_path / "a.toml").write_text("[[kernel]]\nhead_dim = 16\n")
    command = [*"attngen bundle build a.toml -o".split(), "x.attn"]
    patched = NO_HOME.partition("import attngen")[0] + f"sys.argv = {command}\n"
    done = run_there(patched + "from attngen.cli.main import main; main()")
    assert done.returncode == 0 and "nothing but the bundle is kept" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "x.attn"]
    done = run_there(NO_HOME, ATTNGEN_DISABLE_JIT="1")
    assert done.returncode and "CacheError" in done.stderr


# An upgrade of attngen while a process runs: what it compiles is a mixture that no key describes.
UPGRADED = """
import json, sys
from pathlib import Path
import attngen, attngen.compiler.builder
before, when = Path(sys.argv[1]), sys.argv[2]
spec = attngen.AttentionSpec(head_dim=16)
if when == "later":
    attngen.build(spec, "sm_90a")
path = before / sys.argv[3]
path.write_text(path.read_text() + sys.argv[4])
built = attngen.build(attngen.AttentionSpec(head_dim=24), "sm_90a")
print(json.dumps([each.from_cache for each in built]))
"""


@pytest.mark.sampled(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["before the first build", "later"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("attngen/kernels/base.py", "# new\n"),
        ("templates/kernels/wgmma/forward/forward.cu.j2", "// new\n"),
    ],
)
def test_build_of_a_package_that_changed_under_the_process_is_not_stored(
    name: str, text: str, when: str, tmp_path: Path
) -> None:
    for folder in ("attngen", "templates"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / "copy" / folder, ignore=ignore)
    done = subprocess.run(
        [sys.executable, "-c", UPGRADED, str(tmp_path / "copy"), when, name, text],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(tmp_path / "copy"), "ATTNGEN_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False]
    labels = {entry.label for entry in Cache(tmp_path / "cache").entries()}
    of_first = {label for label in labels if "d16" in label}
    assert bool(of_first) == (when == "later")
    if (name.startswith("templates"), when) == (True, "before the first build"):
        assert len(labels) == 2  # templates are read with the first key, and are the new ones
    else:
        assert labels == of_first and done.stderr.count("have changed since") == 1
