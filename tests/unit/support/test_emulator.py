"""The device on the host: it computes what kernels say, and finds what is wrong with them.

Each fault is put into the text of a kernel that is right without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.frontends.pytorch import operation
from attngen.io.files import headers
from tests.emulator import compiler, device, fences, instructions

NUMBERS = """
#include "cuda.hpp"
using namespace emulator;
extern "C" void decode_all(int format, float* values, int count) {
  for (int i = 0; i < count; ++i) values[i] = decode(static_cast<Format>(format), i);
}
extern "C" void encode_all(int format, const float* values, unsigned* bits, int count) {
  for (int i = 0; i < count; ++i) bits[i] = encode(static_cast<Format>(format), values[i]);
}
"""
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

# What is written instead of what, when it is found out, and by what.
FAULTS = {
    "a product is not awaited": (
        "wgmma_wait<0>();\n    release_k();", "release_k();", "late",
        "accumulators were written",
    ),
    "a product before the last is not awaited": (
        "wgmma_wait<1>();", "wgmma_wait<2>();", "late", "wrong|accumulators",
    ),
    "keys are released before they are read": (
        "wgmma_wait<0>();\n    release_k();", "release_k();\n    wgmma_wait<0>();", "random",
        "wrong",
    ),
    "an accumulator is scaled while a product is summed up in it": (
        "wgmma_wait<1>();", "output.sum[0] *= 2.f;\n    wgmma_wait<1>();", "late",
        "accumulators were written",
    ),
    "values are taken before they are there": (
        "mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);", "", "late",
        "wrong|counts fewer",
    ),
    "too many bytes are announced": (
        "mbarrier_arrive_expect(barrier, kBoxes * kRows * 128)",
        "mbarrier_arrive_expect(barrier, kBoxes * kRows * 128 + 16)", "random",
        "deadlock.*an mbarrier",
    ),
    "an mbarrier counts one thread too few": (
        "mbarrier_init(smem + kKEmpty + i * 8, kConsumers * 4)",
        "mbarrier_init(smem + kKEmpty + i * 8, kConsumers * 4 - 1)", "late",
        "wrong|counts fewer|deadlock",
    ),
    "an mbarrier is not initialised": (
        "mbarrier_init(smem + kJobFull, 1);", "", "early", "no mbarrier at",
    ),
    "no fence before copies count at mbarriers": (
        "    mbarrier_init_fence();\n", "", "early", "no fence between the start of the mbarrier",
    ),
    "no fence before a product of registers": (
        "  wgmma_fence();\n", "", "early", "no wgmma.fence",
    ),
    "a warp takes a step more than the others": (
        "    finish_rows(state, factor, ctx, row);", "    finish_rows(state, factor, ctx, row);\n"
        "    if (warp == 1) wgmma_wait<1>();", "early", "fewer steps|warpgroup part",
    ),
    "no fence before the output is stored": (
        "    fence_async_shared();\n    named_barrier_sync(kEpilogueBarrier", "    "
        "named_barrier_sync(kEpilogueBarrier", "early", "no fence between thread",
    ),
    "nobody waits until all warps have staged the output": (
        "fence_async_shared();\n    named_barrier_sync(kEpilogueBarrier + warpgroup, 128);",
        "fence_async_shared();", "early", "wrong|no fence",
    ),
    "stores may read shared memory that the next CTA has": (
        "    if (warp == 0 && lane == 0) tma_store_wait_read();\n  }\n};", "  }\n};", "late",
        "stores may still read",
    ),
    "a lane leaves before the others meet": (
        "Consumer{p, smem, role - 1, warp, lane}.run(slot);",
        "if (lane != 3) Consumer{p, smem, role - 1, warp, lane}.run(slot);", "early", "deadlock",
    ),
    "lanes meet at different operations": (
        "wgmma_wait<1>();", "if (lane == 5) { __syncwarp(); } else { wgmma_wait<1>(); }", "early",
        "lanes of a warp meet at",
    ),
    "a warp awaits its products at a place of its own": (
        "wgmma_wait<1>();", "if (warp == 2) { wgmma_wait<1>(); } else { wgmma_wait<1>(); }",
        "early", "warps of a warpgroup part",
    ),
    "a lane arrives for others that have not looked": (
        "__syncwarp();\n      release_k();", "release_k();", "random", "deadlock",
    ),
    "a named barrier of two sizes": (
        "named_barrier_sync(kEpilogueBarrier + warpgroup, 128)",
        "named_barrier_sync(kEpilogueBarrier + warpgroup, warp == 3 ? 64 : 128)", "early",
        "is for 128 and for 64",
    ),
    "shared memory beyond what was asked for": (
        "constexpr u32 kSmemBarriers = ", "constexpr u32 kSmemBarriers = 131072 + ", "early",
        "of shared memory",
    ),
    "a pointer beyond what was asked for": (
        "reinterpret_cast<Job*>(shared + kSmemJob)",
        "reinterpret_cast<Job*>(shared + kSmemJob + 8)", "early", "behind the end of shared memory",
    ),
}  # fmt: skip


# Faults of kernels by products of warps, whose threads copy what they read.
FAULTS_OF_WARPS = {
    "warps meet at __syncthreads by ways of their own": (
        "named_barrier_sync(1, kThreads);", "__syncthreads();",
        "meet at different places of __syncthreads",
    ),
    "a lane's copy overtakes another's read": (
        "    __syncwarp();\n    if (block < begin) return;", "    if (block < begin) return;",
        "no __syncwarp between a read at .* and a write",
    ),
    "a copy of some of its bytes": (
        "const int present = there ? kBytes : 0;",
        "const int present = there ? kBytes - 2 : 0;", "a copy of 4 bytes from .*, 2 of them",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS_OF_WARPS)
def test_fault_of_warps_is_found(name, tmp_path, monkeypatch):
    """A bias lies in shared memory of each warp, and the last rows are a part of a tile."""
    before, after, found_as = FAULTS_OF_WARPS[name]
    rewrite, places = instructions.rewrite, []

    def break_first(source: str) -> str:
        places.append(source.count(before))
        return rewrite(source.replace(before, after))

    q = torch.randn(1, 130, 2, 128).bfloat16()
    bias = torch.randn(130, 130).bfloat16()
    monkeypatch.setattr(device, "ARCH", "sm_90")
    monkeypatch.setattr(instructions, "rewrite", break_first)
    message = "not found"
    with device.emulated(device.Emulator(tmp_path)):
        try:
            attngen.attention(q, q, q, bias=bias, backend="cuda")
        except AssertionError as error:
            message = str(error)
    assert sum(places), "nothing was broken"
    assert re.search(found_as, message), message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulator")


def call(
    seed: int = 0, length: int = 300, window: tuple[int, int] = (-1, -1)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel of several blocks; returns its output, and the reference's."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, length, 2, 64, generator=generator).bfloat16() for _ in range(3))
    with torch.no_grad():
        found, wanted = (
            attngen.attention(q, k, v, mask="causal", window=window, backend=backend)
            for backend in ("cuda", "reference")
        )
    return found, wanted


def agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found - wanted).abs() < 0.02).all())


@pytest.mark.slow
@pytest.mark.parametrize("timing", device.TIMINGS)
def test_sound_kernel_is_right_at_any_time(timing, folder):
    with device.emulated(device.Emulator(folder, timing)):
        for seed in range(3):
            assert agree(*call(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name, folder, monkeypatch):
    before, after, timing, found_as = FAULTS[name]
    window = (500, 0) if "not looked" in name else (-1, -1)
    if window[0] > 0 or "pointer" in name:
        # Kernels for short calls have no warps that pass over blocks, and ask for more memory.
        monkeypatch.setattr("attngen.kernels.wgmma.forward.cost.is_short", lambda *_: False)
    rewrite, places = instructions.rewrite, []

    def break_first(source: str) -> str:
        places.append(source.count(before))
        return rewrite(source.replace(before, after))

    monkeypatch.setattr(instructions, "rewrite", break_first)
    with device.emulated(device.Emulator(folder, timing)):
        message = ""
        for seed in range(8):
            try:
                if not agree(*call(seed, 600, window)):
                    message = "wrong"
            except AssertionError as error:
                message = str(error)
            if message:
                break
    assert sum(places), "nothing was broken"
    assert re.search(found_as, message), message or "not found"


@pytest.mark.slow
@pytest.mark.parametrize(("at_end", "shift"), [(True, "+ 1"), (False, "- 1"), (True, "- 1")])
def test_access_outside_operands_is_named(at_end, shift, folder, monkeypatch):
    """Rows of the LSE, the last or the first of which lies beside a page that nobody may touch."""
    before, wrong = "lse[i] = result.lse;", f"lse[i {shift}] = result.lse;"
    rewrite = instructions.rewrite
    monkeypatch.setattr(instructions, "rewrite", lambda text: rewrite(text.replace(before, wrong)))
    q, found = torch.randn(1, 1000, 2, 64).bfloat16(), ""
    with device.emulated(device.Emulator(folder, "early")):
        memory = fences.Fences(at_end=at_end)
        monkeypatch.setattr(operation, "_empty_strided_cuda", memory.empty_strided)
        try:
            attngen.attention(q, q, q, backend="cuda", return_lse=True)
        except AssertionError as error:
            found = str(error)
    named = re.search(r"an access at 0x[0-9a-f]+, outside of every operand \(CTA ", found)
    assert bool(named) == (at_end == (shift == "+ 1")), found


@pytest.mark.slow
def test_same_seed_is_the_same_launch(folder):
    q = torch.randn(1, 300, 2, 64).bfloat16().requires_grad_()
    gradients = []
    for _ in range(2):  # of which dQ is summed up in the order in which CTAs come
        with device.emulated(device.Emulator(folder)):
            out = attngen.attention(q, q, q, backend="cuda")
            gradients += torch.autograd.grad(out, q, torch.ones_like(out))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("number", range(4))
def test_formats_are_those_of_torch(number, tmp_path):
    (tmp_path / "numbers.cpp").write_text(NUMBERS)
    library = tmp_path / "numbers.so"
    sources = [tmp_path / "numbers.cpp", compiler.HERE / "numbers.cpp"]
    subprocess.run(["g++", *compiler.FLAGS, "-O1", "-shared", "-o", library, *sources], check=True)
    functions, dtype = ctypes.CDLL(str(library)), DTYPES[number]
    count = 1 << 8 * dtype.itemsize
    integers = torch.arange(count, dtype=torch.int32)
    narrow = integers.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    wanted = narrow.view(dtype).float()
    values = torch.empty(count)
    functions.decode_all(number, ctypes.c_void_p(values.data_ptr()), count)
    assert torch.equal(values.nan_to_num(nan=-7.0), wanted.nan_to_num(nan=-7.0))

    finite = wanted[wanted.isfinite()].sort().values
    halves = (finite[1:] + finite[:-1]) / 2
    inputs = torch.cat([
        finite, halves, halves.nextafter(finite[1:]), halves.nextafter(finite[:-1]),
        torch.randn(10000), torch.randn(10000) * 1e-3, torch.tensor([0.0, -0.0]),
    ]).contiguous()  # fmt: skip
    inputs = inputs[inputs.abs() <= finite.max()]
    bits = torch.empty(len(inputs), dtype=torch.int32)
    functions.encode_all(
        number, ctypes.c_void_p(inputs.data_ptr()), ctypes.c_void_p(bits.data_ptr()), len(inputs)
    )
    as_torch = inputs.to(dtype).view(narrow.dtype).to(torch.int32)
    assert torch.equal(bits, as_torch)


def test_each_statement_of_the_headers_is_known_and_none_else(monkeypatch):
    met = set()

    class Noting(dict):
        def __missing__(self, text: str) -> str:
            met.add(text)
            return ""

    monkeypatch.setattr(instructions, "STATEMENTS", Noting())
    for text in headers().values():
        instructions.rewrite(text.decode())
    monkeypatch.undo()
    assert met == set(instructions.STATEMENTS)


# Waits for the kernel before, each left out of a backward that starts early.
WAIT = "await_dependency();"
WAITS = {
    "queries": (f"ATTNGEN_DEVICE void run() {{\n    {WAIT}", "ATTNGEN_DEVICE void run() {", -1),
    "sums": (
        f"ATTNGEN_DEVICE void run() const {{\n    {WAIT}", "ATTNGEN_DEVICE void run() const {", -1,
    ),
    "what others are told": (f"{WAIT}\n    for (int i = 0;", "\n    for (int i = 0;", 80),
    "what others tell": (f"{WAIT}\n      await_reached(", "await_reached(", 80),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timing"),
    [*((None, timing) for timing in device.TIMINGS), *((name, "late") for name in WAITS)],
)
def test_kernel_that_starts_early_awaits_the_one_before(name, timing, folder, monkeypatch):
    """Late, it gets as far as it can before that one begins, in workspaces that hold what the
    call before left there."""
    before, after, window = WAITS.get(name, ("", "", 80))
    rewrite, places = instructions.rewrite, []

    def leave_out(source: str) -> str:
        places.append(source.count(before))
        return rewrite(source.replace(before, after) if before else source)

    monkeypatch.setattr(instructions, "rewrite", leave_out)
    generator = torch.Generator().manual_seed(0)
    # One head of keys, so that D of the second query head is the kernel's before in any case.
    calls = [
        [torch.randn(1, 300, heads, 128, generator=generator).bfloat16() for heads in (2, 1, 1, 2)]
        for _ in range(2)
    ]

    def gradients(call: int, backend: str) -> tuple[torch.Tensor, ...]:
        *given, d_o = (x.clone().requires_grad_() for x in calls[call])
        out = attngen.attention(*given, mask="causal", window=(window, 0), backend=backend)
        return torch.autograd.grad(out, given, d_o)

    workspaces: dict[int, torch.Tensor] = {}

    def allocate(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made = device._allocate(sizes, strides, dtype)
        return workspaces.setdefault(sizes[0], made) if dtype == torch.uint8 else made

    right = False
    with device.emulated(device.Emulator(folder, timing)):
        monkeypatch.setattr(operation, "_empty_strided_cuda", allocate)
        with contextlib.suppress(AssertionError):
            gradients(0, "cuda")
            pairs = zip(gradients(1, "cuda"), gradients(1, "reference"), strict=True)
            right = all(((x - y).abs() < 0.05).all() for x, y in pairs)
    assert sum(places), "nothing was left out"
    assert right == (name is None)
