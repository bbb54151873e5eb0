"""The kernel that packs an arbitrary mask: every bit of its rows and its columns, and no other."""

from __future__ import annotations

import pytest
import torch

from attngen import AttentionSpec
from attngen.call.mask_bits import numbers_of
from attngen.compiler import builder
from attngen.fragments import features
from attngen.runtime import launch, load, run_time
from attngen.runtime.run_time import Extent, Scalars
from attngen.spec import resolve

from ..emulator.device import ARCH
from . import oracle

pytestmark = pytest.mark.gpu
# By what reads the bits: tiles of queries, of keys, and of both.
READERS = {"rows": (64, "fwd"), "columns": (64, "bwd"), "both": (256, "bwd")}
LENGTHS = [(1, 1), (200, 333), (128, 256), (257, 384), (31, 128), (1000, 48)]
BATCH, HEADS = 2, 3
GARBAGE = 0xA5


def spec_of(reader: str) -> AttentionSpec:
    d, direction = READERS[reader]
    return AttentionSpec(
        head_dim=d, dtype="bf16", mask="none", attn_mask=True, directions=(direction,)
    )


KERNELS = [spec_of(reader) for reader in READERS]


def masks(s_q: int, s_kv: int):
    """Masks of all broadcasts, and what views make of them."""
    generator = torch.Generator(oracle.DEVICE).manual_seed(s_q + s_kv)

    def random(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator, device=oracle.DEVICE) < 0.5

    for b, h in ((1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)):
        for rows, columns in ((s_q, s_kv), (1, s_kv), (s_q, 1), (1, 1)):
            yield random(b, h, rows, columns)
    yield random(s_q, s_kv)
    yield random(1, 1, s_q, s_kv).expand(BATCH, HEADS, s_q, s_kv)
    yield random(HEADS, BATCH, s_kv, s_q).permute(1, 0, 3, 2)
    yield random(BATCH, HEADS, s_q, s_kv + 48)[..., 16:-32]
    yield random(BATCH, HEADS, s_q, s_kv + 3)[..., 1:-2]
    shown = random(BATCH, HEADS, s_q, s_kv)
    bytes_ = torch.randint(1, 256, shown.shape, generator=generator, device=oracle.DEVICE)
    yield (bytes_ * shown).to(torch.uint8).view(torch.bool)  # True is any byte but 0


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("reader", READERS)
def test_bits_are_the_mask_s_and_zero_behind_its_end(reader, lengths):
    (problem,) = resolve.resolve(spec_of(reader), features.scan())
    ((binary, cubin),) = (
        each
        for each in builder.find_kernels(problem, ARCH)
        if each[0].kernel.entry.startswith("mask_pack")
    )
    loaded = load.load(binary, cubin, torch.cuda.current_device())
    s_q, s_kv = lengths
    q = Extent(BATCH, s_q, HEADS, 64, s_q * HEADS * 64, HEADS * 64, 64)
    k = q._replace(seq=s_kv, stride_batch=s_kv * HEADS * 64)
    for mask in masks(s_q, s_kv):
        numbers = numbers_of(mask, s_q, s_kv)
        sizes = run_time.workspace_bytes(loaded.kernel, q, numbers=numbers)
        packed = {
            name: torch.full((size,), GARBAGE, dtype=torch.uint8, device=oracle.DEVICE)
            for name, size in sizes.items()
        }
        addresses = {name: bits.data_ptr() for name, bits in packed.items()}
        addresses["attn_mask"] = mask.data_ptr()
        prepared = launch.prepare(loaded, {"q": q, "k": k, "v": k}, Scalars(1.0, numbers=numbers))
        launch.launch(prepared, addresses, torch.cuda.current_stream().cuda_stream)
        for name, bits in packed.items():
            turned = name == "mask_columns"
            expected = (mask.view(torch.uint8) != 0).expand(BATCH, HEADS, s_q, s_kv)
            expected = expected.transpose(2, 3) if turned else expected
            found = unpacked(bits)
            strides = [numbers[f"{name}_stride_{axis}"] * 32 for axis in ("batch", "head", "row")]
            shown = found.as_strided(expected.shape, (*strides, 1))
            assert torch.equal(shown, expected), f"{name} of {list(mask.shape)} {mask.stride()}"
            assert int(found.sum()) == ones(expected, strides)


def unpacked(bits: torch.Tensor) -> torch.Tensor:
    """A bool a bit, words one after another."""
    shifts = torch.arange(8, device=oracle.DEVICE)
    return (bits[:, None] >> shifts & 1).bool().flatten()


def ones(expected: torch.Tensor, strides: list[int]) -> int:
    """Bits that are set, each counted once where the mask is broadcast."""
    for axis, stride in enumerate(strides):
        expected = expected if stride else expected.narrow(axis, 0, 1)
    return int(expected.sum())
