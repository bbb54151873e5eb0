"""Small kernels that were never compiled, and their keys, for the tests of the cache."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from attngen.compiler.digest import CacheKey, digest_text
from attngen.io.values import to_data, to_json
from attngen.runtime.program import SCHEMA_VERSION, Binary, Field, KernelEntry, Resources
from attngen.spec.problem import Problem
from tests.support.paths import ROOT

ARCH = "sm_90a"
TOOLCHAIN = "13.0.88"
CUBIN = b"\x7fELF, or so it says"
PROBLEM = Problem(
    direction="fwd",
    dtype_q="bf16",
    dtype_kv="bf16",
    dtype_o="bf16",
    head_dim_qk=64,
    head_dim_v=64,
    masks=("causal",),
    scores=(),
    softmax="vanilla",
    q_seq="dense",
    kv_seq="dense",
    kv_fetch="tma",
    kv_iter="range",
)
KERNEL = KernelEntry(
    entry="fake",
    threads=128,
    smem_bytes=0,
    tile_rows=64,
    params_bytes=8,
    fields=(Field("lse", "ptr", 0),),
    tensor_maps=(),
    grid="persistent_tiles",
    workspace=(),
)


def make_key(tag: str = "a", toolchain: str | None = TOOLCHAIN) -> CacheKey:
    """A key whose material differs with the tag."""
    material = to_json({"arch": ARCH, "problem": to_data(PROBLEM), "tag": tag})
    return CacheKey(digest_text(material), toolchain, f"fake_{tag}", material, f"make {tag}")


def make_binary(cubin: bytes = CUBIN, toolchain: str = "nvrtc 13.0") -> Binary:
    """A launch program that fits the cubin."""
    return Binary(
        schema=SCHEMA_VERSION,
        arch=ARCH,
        problem=PROBLEM,
        kernel=KERNEL,
        resources=Resources(1, 0, 0, len(cubin)),
        toolchain=toolchain,
        source_sha256="0" * 64,
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
    )


class FakeCompiler:
    """Counts how often it is asked; gives the binary of `cubin`."""

    def __init__(self, cubin: bytes = CUBIN) -> None:
        self.cubin = cubin
        self.calls = 0

    def __call__(self) -> tuple[Binary, bytes]:
        self.calls += 1
        return make_binary(self.cubin), self.cubin


def never() -> tuple[Binary, bytes]:
    """A compiler that must not be asked."""
    raise AssertionError("compiled, though the cache should have had it")


def rewrite_metadata(entry: Path, **changes: object) -> None:
    """Changes fields of an entry's metadata, and its checksums with them."""
    path = entry / "metadata.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(data))
    seal(entry)


def seal(entry: Path) -> None:
    """Checksums that fit whatever the files now hold."""
    names = ("kernel.cubin", "metadata.json")
    digests = [hashlib.sha256((entry / name).read_bytes()).hexdigest() for name in names]
    lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
    (entry / "SHA256SUMS").write_text("".join(lines))


def start_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process in the checkout that runs `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
