"""A server without a compiler: an installed wheel, stripped of templates and headers, in a process
where nothing that compiles can be imported. With a bundle, all but the GPU's own part works."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attngen.compiler import batch, digest
from attngen.compiler.cache import Cache
from attngen.fragments import features
from attngen.io.files import templates_dir
from attngen.ship import writer as bundle_write
from attngen.spec.attention_spec import AttentionSpec
from tests.support.paths import ROOT

SPECS = [
    AttentionSpec(head_dim=64, mask="causal", window=True, name="local"),
    AttentionSpec(head_dim=64, mask="causal", directions=("fwd", "bwd"), name="trained"),
]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling"),
]

# Nothing that makes a kernel can be imported, and no template or header be opened.
SERVER = """
import sys
BLOCKED = ("jinja2", "markupsafe", "cuda.bindings.nvrtc", "cuda.bindings.cynvrtc",
           "cuda.bindings._internal.nvrtc", "cutlass", "nvidia.cuda_nvrtc")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in BLOCKED):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
def refuse(event, arguments):
    if event == "open" and str(arguments[0]).endswith((".j2", ".cuh")):
        raise AssertionError(f"{arguments[0]} is opened")
sys.meta_path.insert(0, Blocker())
sys.addaudithook(refuse)
import attngen, json
from pathlib import Path
assert not (Path(attngen.__file__).parent / "templates").exists()
"""

# Everything up to the launch, as on a Hopper GPU: the driver's part is replaced.
CALL = """
import contextlib, torch
from attngen import AttentionSpec
from attngen.frontends.pytorch import routing
from attngen.call import kernel_choice
from attngen.call.table import AttentionCall
from attngen.kernels.family import Choice
from attngen.runtime import load
routing.device_arch = lambda device: "sm_90a"
load.on_device = lambda device: contextlib.nullcontext()
load.load = lambda binary, cubin, device: (binary.kernel.entry, cubin[:4] == b"\\x7fELF")
q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
call = AttentionCall(q=q, k=q, v=q, mask="causal", window=(4, 0))
print(json.dumps({
    "refusals": routing.refusals(call),
    "spiral": routing.refusals(AttentionCall(q=q, k=q, v=q, mask="spiral")),
    "kernels": [
        kernel_choice.kernels_of(
            AttentionSpec(head_dim=64, mask="causal", **more),
            kernel_choice.Device("cuda:0", 0, "sm_90a"),
            Choice(kernel=kernel),
        )
        for more, kernel in (
            ({"window": True}, "sm90_fwd"), ({}, "sm90_fwd_short"), ({"directions": ("bwd",)}, None)
        )
    ],
}))
"""

# A reference call, without any bundle, needs no template either.
REFERENCE = """
import torch
x = torch.zeros(1, 8, 2, 16)
print(json.dumps(list(attngen.attention(x, x, x, mask="causal").shape)))
"""

MISSING = """
from attngen.errors import BundleError, CacheError
from attngen.compiler.builder import find_kernels
from attngen.spec.problem import Problem
from attngen.io.values import from_json
specs = [attngen.AttentionSpec(head_dim=dim, directions=("fwd", "bwd"), name="wide")
         for dim in (64, 128)]
reasons = []
try:
    attngen.load_bundle(sys.argv[1], require=specs)
except BundleError as error:
    reasons.append(error.reasons)
try:
    find_kernels(from_json(Problem, sys.argv[2]), "sm_90a")
except CacheError as error:
    reasons.append(error.reasons)
print(json.dumps(reasons))
"""

CACHED = """
from attngen.compiler.builder import build
print(json.dumps([built.from_cache for built in build(attngen.AttentionSpec(
    head_dim=64, mask="causal", window=True))]))
"""


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH with what the wheel installs, templates and headers removed."""
    folder = tmp_path_factory.mktemp("dist")
    command = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    target = tmp_path_factory.mktemp("server")
    zipfile.ZipFile(wheel).extractall(target)
    shutil.rmtree(target / "attngen" / "templates")
    shutil.rmtree(target / "attngen" / "cuda")
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle of the specs' kernels, and the cache that has them too."""
    folder = tmp_path_factory.mktemp("built")
    cache = Cache(folder / "cache")
    jobs, refused = batch.jobs_of(SPECS, None)
    outcomes = list(batch.run(jobs, cache))
    assert not refused and all(outcome.error is None for outcome in outcomes)
    programs = batch.programs_of(outcomes)
    bundle_write.write(folder / "x.attn", programs, batch.cubins_of(outcomes, cache))
    return folder / "x.attn", cache.root


def serve(stripped: Path, code: str, *arguments: str, **environment: str) -> object:
    """Run code on the server, and parse what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATTNGEN_")}
    done = subprocess.run(
        [sys.executable, "-c", SERVER + code, *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env={**kept, "PYTHONPATH": str(stripped), "ATTNGEN_DISABLE_JIT": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_server_call_with_a_bundle_gets_to_the_launch(
    stripped: Path, built: tuple[Path, Path], tmp_path: Path
) -> None:
    environment = {"ATTNGEN_BUNDLES": str(built[0]), "ATTNGEN_CACHE_DIR": str(tmp_path / "none")}
    found = serve(stripped, CALL, **environment)
    assert isinstance(found, dict) and found["refusals"] == []
    assert "'spiral'" in found["spiral"][0] and "causal" in found["spiral"][0]
    kernels = [[name.partition("__")[0] for name, _ in each] for each in found["kernels"]]
    backward = ["bwd_prepare", "sm90_bwd", "bwd_convert"]
    assert kernels == [["sm90_fwd"], ["sm90_fwd_short"], backward]
    assert all(is_elf for each in found["kernels"] for _, is_elf in each)


@pytest.mark.slow
def test_server_reference_needs_no_template(stripped: Path) -> None:
    assert serve(stripped, REFERENCE) == [1, 8, 2, 16]


@pytest.mark.slow
def test_server_lists_all_that_is_missing_with_the_command(
    stripped: Path, built: tuple[Path, Path], tmp_path: Path
) -> None:
    problem, _ = (job.problem for job in batch.jobs_of([AttentionSpec(head_dim=96)], None)[0])
    arguments = (str(built[0]), digest.to_json(problem))
    required, called = serve(stripped, MISSING, *arguments, ATTNGEN_CACHE_DIR=str(tmp_path))  # type: ignore[misc]
    *missing, command = required
    wanted = [f"full_d{dim}_bf16 ({way}, sm_90a)" for dim in (64, 128) for way in ("fwd", "bwd")]
    assert missing == [f"no bundle has {what} for wide" for what in wanted]
    assert command == "build them: attngen bundle build SPECS.toml -o NAME.attn"
    assert "full_d96_bf16 (fwd, sm_90a) is in no mounted bundle" in called[0]
    assert any("sm90_fwd__full_d96_bf16 for sm_90a is not in the cache" in each for each in called)


@pytest.mark.slow
def test_server_finds_its_cache_too(stripped: Path, built: tuple[Path, Path]) -> None:
    assert serve(stripped, CACHED, ATTNGEN_CACHE_DIR=str(built[1])) == [True, True]


def test_server_that_may_compile_says_what_is_missing(stripped: Path, tmp_path: Path) -> None:
    environment = {"ATTNGEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(stripped)}
    code = "import attngen; attngen.build(attngen.AttentionSpec(head_dim=64))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, **environment},
    )
    assert "no templates beside or inside" in done.stderr and "reinstall attngen" in done.stderr


def test_shipped_facts_are_those_of_the_templates(stripped: Path) -> None:
    code = """
from attngen.compiler import digest
from attngen.fragments import features
from attngen.io.values import to_data
print(json.dumps([to_data(features.scan()), digest.source_digests()]))
"""
    found, digests = serve(stripped, code)  # type: ignore[misc]
    of_templates = features.scan(templates_dir())  # without what tests before registered
    assert found == json.loads(digest.to_json(of_templates))
    assert digests == digest.source_digests()
