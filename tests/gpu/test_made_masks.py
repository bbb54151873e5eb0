"""Masks that are made before a call: bits of their programs, and kernels that visit what they
show."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import attngen
from attngen.call.made_mask import GRANULE, parts_of
from attngen.frontends.pytorch.callables import (
    bits as callable_bits,
)
from attngen.frontends.pytorch.callables import (
    calls as callables,
)
from attngen.frontends.pytorch.callables import (
    listed as callable_listed,
)
from attngen.frontends.pytorch.callables.bits import made_by, maker_of
from attngen.frontends.pytorch.callables.mask import Sizes, shown_by

from . import gradients, oracle, varlen

pytestmark = pytest.mark.gpu

ROWS, KEYS, HEADS = 200, 330, 2
MaskMod = Callable[..., torch.Tensor]


def documents(device: torch.device) -> MaskMod:
    """Documents, of a width of its own for each sequence, and some keys that heads see."""
    document = torch.arange(KEYS, device=device) // torch.tensor([[130], [70]], device=device)
    return lambda b, h, i, j: (document[b, i] == document[b, j]) | (j < 3 + 80 * h)


def islands(device: torch.device) -> MaskMod:
    """Few blocks far from each other, and queries that see nothing."""
    return lambda b, h, i, j: (i // 64 % 2 == 0) & (j // 64 == (3 * (i // 64) + 1) % 5)


MODS = {each.__name__: each for each in (documents, islands)}


def check(d: int, mod: MaskMod | None, deterministic: bool = False, **arguments: Any) -> None:
    """Hold outputs and gradients to the definition, with kernels that visit lists of blocks."""
    tensors = oracle.operands(2, HEADS, 1, ROWS, KEYS, d)
    made = mock.patch.object(callable_listed, "maker_of", wraps=maker_of)
    with made as spy:
        oracle.check_call(*tensors, mask_mod=mod, **arguments)
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        d_o = oracle.randn(2, ROWS, HEADS, d, dtype=tensors[0].dtype, seed=5)
        switches = {"deterministic": deterministic, "backend": "cuda"}
        out = attngen.attention(*leaves, mask_mod=mod, **arguments, **switches)
        found = torch.autograd.grad(out, leaves, d_o)
    assert spy.called
    gradients.check(found, (*tensors, d_o), None, mask_mod=mod, **arguments)


@pytest.mark.parametrize("name", MODS)
def test_blocks_that_masks_show_are_all_that_counts(name) -> None:
    check(128, MODS[name](oracle.DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("d", [44, 64, 192, 256])
def test_blocks_that_masks_show_are_all_that_counts_of_other_head_dims(d, name) -> None:
    check(d, MODS[name](oracle.DEVICE))


@pytest.mark.slow
def test_lists_of_blocks_stand_beside_masks_scores_and_an_order() -> None:
    mod = documents(oracle.DEVICE)
    check(128, mod, deterministic=True)
    check(64, mod, window=(60, 40), softcap=4.0)
    check(128, mod, mask="causal_bottom_right", alibi_slopes=True, softmax="off_by_one")
    check(128, mod, score_mod=lambda s, b, h, i, j: s * (1 + 0.01 * (i % 7)))
    seed = torch.tensor([7, 0], device=oracle.DEVICE)
    check(64, mod, dropout_p=0.25, rng_state=seed)
    check(128, mod, dropout_p=0.25, rng_state=seed)
    check(128, mod, seqused_kv=varlen.int32((KEYS, 201)))


@pytest.mark.parametrize("shape", [(ROWS, KEYS), (2, 1, ROWS, 1), (HEADS, 1, KEYS)])
def test_booleans_beside_a_function_hide_what_they_hide(shape) -> None:
    draw = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))
    shown = (draw < 0.7).to(oracle.DEVICE)
    check(64, documents(oracle.DEVICE), attn_mask=shown)


def test_integers_beside_a_function_are_no_booleans() -> None:
    tensors, mod = oracle.operands(1, HEADS, 1, 64, 128, 64), islands(oracle.DEVICE)
    for sizes in ((64, 128), (3,)):
        shown = torch.ones(sizes, dtype=torch.int32, device=oracle.DEVICE)
        with pytest.raises(attngen.SpecError, match="attn_mask needs bool"):
            attngen.attention(*tensors, mask_mod=mod, attn_mask=shown, backend="cuda")


def test_captured_tensors_are_let_go() -> None:
    tensors = oracle.operands(1, HEADS, 1, 64, 128, 64)
    table = torch.ones(64, 128, dtype=torch.bool, device=oracle.DEVICE)
    known = weakref.ref(table)

    def of(table: torch.Tensor) -> MaskMod:
        return lambda b, h, i, j: table[i, j]

    attngen.attention(*tensors, mask_mod=of(table), backend="cuda")
    del table
    gc.collect()
    assert known() is None


@pytest.mark.slow
def test_masks_follow_booleans_that_change() -> None:
    q, k, v = oracle.operands(1, HEADS, 1, 64, 128, 64)
    schedule, mod = attngen.Schedule(), islands(oracle.DEVICE)
    shown = torch.ones(64, 128, dtype=torch.bool, device=oracle.DEVICE)

    def out(backend: str) -> torch.Tensor:
        given: dict[str, Any] = {"mask_mod": mod, "attn_mask": shown, "backend": backend}
        with torch.no_grad():
            return attngen.attention(q, k, v, schedule=schedule, **given).float()

    found = []
    for keys in (128, 70):
        shown[:, keys:] = False
        found.append(out("cuda"))
        torch.testing.assert_close(found[-1], out("reference"), rtol=2e-2, atol=2e-2)
    assert not torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("mod", [None, islands], ids=["alone", "beside a function"])
@pytest.mark.parametrize("size", [(128, 128), (32, 48), (7, 90)])
def test_lists_of_a_block_mask_are_believed(size, mod) -> None:
    """Blocks in no list show nothing, whole ones all, the others what the function says; of two
    functions both do."""
    device, (down, across) = oracle.DEVICE, size
    rows, columns = -(-ROWS // down), -(-KEYS // across)
    draw = torch.rand(2, 1, rows, columns, generator=torch.Generator().manual_seed(down))
    partial, whole = (draw < 0.4).to(device), (draw > 0.7).to(device)
    lists = [(~x).int().argsort(dim=-1, stable=True).int() for x in (partial, whole)]
    counts = [x.sum(-1).int() for x in (partial, whole)]
    made = BlockMask.from_kv_blocks(
        *(counts[0], lists[0], counts[1], lists[1]),
        BLOCK_SIZE=size,
        mask_mod=MODS["documents"](device),
        seq_lengths=(ROWS, KEYS),
    )
    check(64, mod and mod(device), block_mask=made)


@pytest.mark.slow
def test_calls_that_share_a_schedule_share_their_masks() -> None:
    q, k, v = oracle.operands(1, HEADS, 1, 64, 128, 64)
    schedule, mod = attngen.Schedule(), islands(oracle.DEVICE)

    def made(**arguments: Any) -> int:
        name = "start_on_its_device"
        counted = mock.patch.object(callable_bits, name, wraps=getattr(callable_bits, name))
        with torch.no_grad(), counted as spy:
            attngen.attention(q, k, v, mask_mod=mod, backend="cuda", **arguments)
        return spy.call_count

    for _ in range(3):
        made(schedule=schedule)
    assert (made(schedule=schedule), made()) == (0, 0)
    schedule.reset()
    assert (made(), made(), made(schedule=schedule), made()) == (1, 1, 1, 0)


@pytest.mark.slow
def test_gradients_of_a_sink_alone_find_what_they_read() -> None:
    q, k, v = oracle.operands(1, HEADS, 1, 64, 128, 64)
    mod = islands(oracle.DEVICE)

    def gradient(backend: str) -> torch.Tensor:
        sink = torch.zeros(HEADS, device=oracle.DEVICE, requires_grad=True)
        more: dict[str, Any] = {"softmax": "learnable", "sink": sink, "backend": backend}
        attngen.attention(q, k, v, mask_mod=mod, **more).float().square().sum().backward()
        assert sink.grad is not None
        return sink.grad

    torch.testing.assert_close(gradient("cuda"), gradient("reference"), rtol=2e-2, atol=2e-2)


def bits_of(words: torch.Tensor, rows: int, stride: int) -> torch.Tensor:
    """The bits of so many rows of words."""
    lines = words[..., : rows * stride].unflatten(-1, (-1, stride))
    return (lines[..., None] >> torch.arange(32, device=words.device) & 1).flatten(-2).bool()


def granules_of(pairs: torch.Tensor) -> torch.Tensor:
    """The pairs as granules of rows and columns, in the last two axes; behind the last none."""
    spare = [-length % GRANULE for length in pairs.shape[2:]]
    whole = torch.nn.functional.pad(pairs, (0, spare[1], 0, spare[0]))
    sides = whole.unflatten(-1, (-1, GRANULE)).unflatten(-3, (-1, GRANULE))
    return sides.transpose(-3, -2).flatten(-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODS, "near"])
def test_bits_and_maps_are_those_of_the_pairs(name) -> None:
    device, sizes = torch.empty(0, device=oracle.DEVICE).device, Sizes(2, HEADS, ROWS, KEYS)
    mod = MODS[name](device) if name in MODS else lambda b, h, i, j: (i - j).abs() < 250
    traced = callables._traced("mask_mod", mod, device)
    shown = shown_by(traced, sizes, device)
    made = made_by(traced, sizes, device, columns=True)
    parts = parts_of(ROWS, KEYS, columns=True)
    assert made.shape == (*shown.shape[:2], parts.words)
    for part, stride, map_stride, pairs in (
        ("row", parts.rows_stride, parts.row_map_stride, shown),
        ("column", parts.columns_stride, parts.column_map_stride, shown.transpose(2, 3)),
    ):
        rows, length = pairs.shape[2:]
        bits = bits_of(made[..., parts.starts[f"mask_{part}s"] :], rows, stride)
        assert torch.equal(bits[..., :length], pairs) and not bits[..., length:].any()
        granules = granules_of(pairs)
        lines = made[..., parts.starts[f"mask_{part}_map"] :]
        some, whole = bits_of(lines, granules.shape[2], map_stride).chunk(2, dim=-1)
        count = granules.shape[3]
        assert torch.equal(some[..., :count], granules.any(-1)) and not some[..., count:].any()
        assert torch.equal(whole[..., :count], granules.all(-1)) and not whole[..., count:].any()
    assert name != "near" or whole.any()
