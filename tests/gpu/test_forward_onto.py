"""Forwards that go on from an output and an LSE: parts of keys one after another are one call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen.frontends.pytorch.forward_onto  # noqa: F401  # defines the operation
from attngen import AttentionSpec, SpecError

from . import oracle

pytestmark = pytest.mark.gpu
# Head dims, lengths of queries and keys, where keys are cut, and what the parts say.
CASES = [
    ((128, 128), (150, 200), (0, 70, 200), {}),
    ((64, 64), (100, 180), (0, 64, 64, 180), {"softcap": 3.0}),
    ((192, 128), (70, 100), (0, 33, 100), {}),
    ((256, 256), (70, 90), (0, 40, 90), {}),
    ((100, 52), (90, 80), (0, 30, 80), {}),  # which threads copy
    ((264, 72), (150, 200), (0, 70, 200), {"softcap": 3.0}),  # whose columns warpgroups share
    ((300, 77), (90, 80), (0, 30, 80), {}),
    ((512, 512), (70, 90), (0, 40, 90), {}),  # read in parts, as registers are few
]
# Head dims of packed parts, and what they say.
PACKED = [((64, 64), {}), ((128, 128), {"softcap": 3.0}), ((100, 52), {}), ((192, 128), {})]
KERNELS = [
    AttentionSpec(
        head_dim=d, head_dim_v=d_v, softcap="softcap" in given, out_dtype="fp32", continues=True
    )
    for (d, d_v), _, _, given in CASES
] + [AttentionSpec(head_dim=64, mask="causal", out_dtype="fp32", continues=True)]
KERNELS += [
    AttentionSpec(
        head_dim=d,
        head_dim_v=d_v,
        softcap="softcap" in given,
        layout="thd",
        mask="causal",
        out_dtype="fp32",
        positions=True,
        continues=True,
    )
    for (d, d_v), given in PACKED
]
JOIN = torch.ops.attngen.forward_onto


def operands(dims: tuple[int, int], lengths: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    return oracle.operands(2, 4, 2, *lengths, *dims, torch.bfloat16)


def empty_state(q: Tensor, d_v: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and rounded output of so many rows, NaN as memory may be that nobody wrote."""
    batch, _, heads, _ = q.shape
    nan = float("nan")
    out = q.new_full((batch, room, heads, d_v), nan, dtype=torch.float32)
    lse = q.new_full((batch, heads, room), nan, dtype=torch.float32)
    return out, lse, q.new_full(out.shape, nan)


@pytest.mark.parametrize(("dims", "lengths", "cuts", "given"), CASES, ids=str)
def test_parts_one_after_another_are_one_call(dims, lengths, cuts, given):
    """Rows of a larger state, whose others stay as they are."""
    q, k, v = operands(dims, lengths)
    s_q, _ = lengths
    whole_out, whole_lse, whole_rounded = empty_state(q, v.shape[-1], s_q + 20)
    out, lse, rounded = whole_out[:, 20:], whole_lse[:, :, 20:], whole_rounded[:, 20:]
    for begin, end in pairwise(cuts):
        narrow = rounded if end == k.shape[1] else None
        state = out, lse, narrow, None, begin > 0, True
        JOIN(q, k[:, begin:end], v[:, begin:end], *state, **given, out_dtype="float32")
    oracle.check(out, lse, oracle.truth(q, k, v, **given))
    assert torch.equal(rounded, out.to(rounded.dtype))
    others = whole_out[:, :20], whole_lse[:, :, :20], whole_rounded[:, :20]
    assert all(x.isnan().all() for x in others)


def test_rows_that_see_no_key_yet_are_joined_later():
    """Causal parts, of which the first shows the first rows nothing."""
    q, k, v = operands((64, 64), (130, 130))
    out, lse, rounded = empty_state(q, 64, 130)
    given: dict[str, Any] = {"mask": "causal", "out_dtype": "float32"}
    state = out, lse, None, None, False, True
    JOIN(q, k[:, 60:], v[:, 60:], *state, positions="0 60 -60 0 0", **given)
    assert (lse[:, :, :60] == -torch.inf).all() and not out[:, :60].any()
    state = out, lse, rounded, None, True, True
    JOIN(q, k[:, :60], v[:, :60], *state, positions="0 0 0 0 0", **given)
    oracle.check(out, lse, oracle.truth(q, k, v, mask="causal"))


@pytest.mark.parametrize("dims", [(128, 128), (100, 52)], ids=str)
def test_sums_that_nobody_wants_are_not_written(dims):
    """A part that goes on, and one of all keys, whose sums may be anything."""
    q, k, v = operands(dims, (150, 200))
    out, lse, rounded = empty_state(q, v.shape[-1], 150)
    JOIN(q, k[:, :90], v[:, :90], out, lse, None, None, False, True, out_dtype="float32")
    before = out.clone()
    JOIN(q, k[:, 90:], v[:, 90:], out, lse, rounded, None, True, False, out_dtype="float32")
    assert torch.equal(out, before)
    truth = oracle.truth(q, k, v)
    oracle.check(rounded, lse, truth)
    alone = empty_state(q, v.shape[-1], 150)
    JOIN(q, k, v, *alone, None, False, False, out_dtype="float32")
    assert alone[0].isnan().all()
    oracle.check(alone[2], alone[1], truth)


def test_no_keys_leave_the_output_as_it_is():
    q, k, v = operands((64, 64), (30, 30))
    out, lse, rounded = empty_state(q, 64, 30)
    JOIN(q, k[:, :0], v[:, :0], out, lse, rounded, None, False, True, out_dtype="float32")
    assert (lse == -torch.inf).all() and not out.any() and not rounded.any()


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
def test_no_keys_round_what_is_there(layout):
    """Rows that have seen no key have outputs that may be anything."""
    q, k, v = operands((64, 64), (30, 30))
    out, lse, rounded = (torch.zeros_like(x) for x in empty_state(q, 64, 30))
    out += 2
    lse[0, 1, 7], out[0, 7, 1] = -torch.inf, torch.nan
    more, axes = {}, {"sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}.get(layout, (0, 1, 2, 3))
    tensors = [x.permute(axes).contiguous() for x in (q, k, v, out, rounded)]
    if layout == "thd":
        tensors, lse = [x[0] for x in tensors], lse[0]
        more = {"cu_seqlens_q": starts(0, 30), "cu_seqlens_kv": starts(0, 0)}
    q, k, v, out, rounded = tensors
    none = slice(0, 0)
    k, v = (x[:, :, none] if layout == "bhsd" else x[none] for x in (k, v))
    if layout == "bshd":
        k, v = (x.new_empty(2, 0, *x.shape[2:]) for x in (k, v))
    given = {"layout": layout, "out_dtype": "float32", **more}
    JOIN(q, k, v, out, lse, rounded, None, True, False, **given)
    assert torch.equal(rounded, out.nan_to_num(0.0).to(rounded.dtype)) and out.isnan().any()
    if layout == "thd":
        with pytest.raises(SpecError, match="marks beside no keys"):
            JOIN(q, k, v, out, lse, rounded, starts(2), True, True, **given)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"out_dtype": "bfloat16"}, "float32"),
        ({"out_dtype": "float32", "softmax": "off_by_one"}, "sinks"),
        ({"out_dtype": "float32", "max_logit": True}, "max_logit"),
    ],
    ids=str,
)
def test_what_cannot_be_joined_is_refused(change, reason):
    q, k, v = operands((64, 64), (30, 30))
    out, lse, _ = empty_state(q, 64, 30)
    with pytest.raises(SpecError, match=reason):
        JOIN(q, k, v, out, lse, None, None, False, True, **change)


def test_states_of_other_shapes_are_refused():
    q, k, v = operands((64, 64), (30, 30))
    out, lse, rounded = empty_state(q, 64, 30)
    with pytest.raises(SpecError, match="needs rounded"):
        JOIN(q, k, v, out, lse, None, None, True, False, out_dtype="float32")
    for o, rows, narrow, reason in (
        (out[:, 1:], lse, None, "o needs"),
        (out, lse[..., :-1], None, "lse needs"),
        (out, lse.mT.contiguous().mT, None, "lse: strides"),
        (out, lse, rounded.float(), "rounded needs"),
        (out, lse, rounded.mT.contiguous().mT, "rounded: strides"),
    ):
        with pytest.raises(SpecError, match=reason):
            JOIN(q, k, v, o, rows, narrow, None, True, True, out_dtype="float32")


def starts(*numbers: int) -> Tensor:
    """Integers of packed sequences, on the device."""
    return torch.tensor(numbers, dtype=torch.int32, device=oracle.DEVICE)


@pytest.mark.parametrize(("dims", "given"), PACKED, ids=str)
def test_packed_sequences_join_each_on_its_own_diagonal(dims, given):
    """Parts of three sequences with gaps, of which the first has all its keys in the first launch,
    in which the last has no key; marks say what is written of each, and other rows stay."""
    q, k, v = (x[0] for x in operands(dims, (200, 260)))
    out, lse, rounded = (x[0] for x in empty_state(q[None], v.shape[-1], 200))
    given = {"mask": "causal", "layout": "thd", "out_dtype": "float32", **given}
    lse.fill_(-torch.inf)  # of rows that have seen no key: their outputs may be anything
    of_q = {"cu_seqlens_q": starts(0, 60, 130, 170), "cu_seqlens_q_padded": starts(5, 70, 150, 200)}

    def part(begins: list[int], sizes: list[int], diagonals: list[int], marks: list[int]) -> None:
        ends = [0, *(sum(sizes[: n + 1]) for n in range(3))]
        keys = {"cu_seqlens_kv": starts(*ends), "cu_seqlens_kv_padded": starts(*begins, 260)}
        places = starts(*(n for x in diagonals for n in (0, 0, x, 0))).view(3, 4)
        placed = {"positions": "0 0 0 0 0", "fragment_0": places}
        state = out, lse, rounded, starts(*marks), True, True
        JOIN(q, k, v, *state, **given, **of_q, **keys, **placed)

    part([0, 80, 180], [70, 30, 0], [9, 20, 0], [2, 1, 3])
    assert out[5:65].isnan().all() and rounded[70:140].isnan().all()
    part([80, 110, 180], [0, 50, 70], [0, -10, 30], [0, 3, 2])
    assert out[5:65].isnan().all() and not out[70:140].isnan().any()
    keys = [(0, 70, 9), (80, 160, 20), (180, 250, 30)]
    for first, rows, (begin, end, diagonal) in zip((5, 70, 150), (60, 70, 40), keys, strict=True):
        own = [x[None] for x in (q[first : first + rows], k[begin:end], v[begin:end])]
        more = {name: x for name, x in given.items() if name in ("mask", "softcap")}
        truth = oracle.truth(*own, **more, positions=(0, 0, diagonal))
        found = rounded[None, first : first + rows], lse[None, :, first : first + rows]
        oracle.check(*found, truth)
    assert rounded[:5].isnan().all() and rounded[140:150].isnan().all()
    assert (lse[:, 190:] == -torch.inf).all() and out[190:].isnan().all()
