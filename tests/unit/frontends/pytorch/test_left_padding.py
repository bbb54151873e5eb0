"""Sequences that begin behind the first row: each is attention over its own rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import SpecError, fp8
from attngen.call.decode import OWN_NUMBER
from attngen.call.table import ROWS, make_call
from attngen.frontends.pytorch import left_padding
from tests.support.te_kit import randn

Q_ROWS, KV_ROWS = [(2, 6), (0, 4), (6, 6)], [(1, 8), (5, 7), (0, 8)]  # first and last but one
HEADS, GROUPS, DIM = 4, 2, 8


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


STARTS = integers([1, 5, 0])


def operands(layout: str) -> list[Tensor]:
    """Q, K and V with NaN where no sequence is."""
    found = []
    for n, (heads, room, rows) in enumerate(
        ((HEADS, 6, Q_ROWS), (GROUPS, 8, KV_ROWS), (GROUPS, 8, KV_ROWS))
    ):
        x = randn(3, room, heads, DIM, seed=n)
        for b, (start, end) in enumerate(rows):
            x[b, :start] = x[b, end:] = torch.nan
        found.append(x.permute(["bshd".index(axis) for axis in layout]).requires_grad_())
    return found


def starts_and_ends() -> dict[str, Tensor]:
    found = {}
    for side, rows in (("q", Q_ROWS), ("kv", KV_ROWS)):
        starts, ends = zip(*rows, strict=True)
        found |= {f"seqstart_{side}": integers(starts), f"seqused_{side}": integers(ends)}
    return found


def rows_of(x: Tensor, layout: str, b: int, rows: tuple[int, int]) -> Tensor:
    """A sequence's rows [1, s, h, d] of its own."""
    whole = x.detach().permute([layout.index(axis) for axis in "bshd"])
    return whole[b : b + 1, rows[0] : rows[1]].clone().requires_grad_()


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("more", [{"mask": "causal_bottom_right", "window": (3, 0)}, {}], ids=str)
def test_sequences_are_their_rows(layout: str, more: dict[str, Any]) -> None:
    tensors, slopes = operands(layout), torch.tensor([0.5, 0.25, 0.125, 1.0])
    more = more | {"alibi_slopes": slopes}
    out, aux = attngen.attention(
        *tensors, layout=layout, return_lse=True, **starts_and_ends(), **more
    )
    assert out.shape == tensors[0].shape and out.is_contiguous()
    (out.square().sum() + aux.lse[aux.lse.isfinite()].sum()).backward()
    lse = torch.full((3, HEADS, 6), -torch.inf, dtype=torch.float64)
    for b, (q_rows, kv_rows) in enumerate(zip(Q_ROWS, KV_ROWS, strict=True)):
        own = [
            rows_of(x, layout, b, rows)
            for x, rows in zip(tensors, (q_rows, kv_rows, kv_rows), strict=True)
        ]
        wanted, own_aux = attngen.attention(*own, return_lse=True, **more)
        (wanted.square().sum() + own_aux.lse[own_aux.lse.isfinite()].sum()).backward()
        lse[b, :, q_rows[0] : q_rows[1]] = own_aux.lse[0].detach()
        torch.testing.assert_close(rows_of(out, layout, b, q_rows), wanted)
        for x, mine, rows in zip(tensors, own, (q_rows, kv_rows, kv_rows), strict=True):
            gradient = x.grad.permute([layout.index(axis) for axis in "bshd"])[b]
            torch.testing.assert_close(gradient[rows[0] : rows[1]], mine.grad[0])
            assert not gradient[: rows[0]].any() and not gradient[rows[1] :].any()
    torch.testing.assert_close(aux.lse.detach(), lse)
    beside = lse.permute(0, 2, 1).isinf().all(-1)
    assert not out.permute([layout.index(axis) for axis in "bshd"])[beside].any()


def test_one_side_begins_and_cumulative_lengths_end_it() -> None:
    q, k, v = (randn(3, 8, 2, DIM, seed=n) for n in range(3))
    begin, ends = integers([0, 3, 8]), integers([0, 5, 12, 20])
    found = attngen.attention(q, k, v, seqstart_kv=begin, cu_seqlens_kv=ends, cu_seqlens_q=ends)
    for b, (start, end) in enumerate(((0, 5), (3, 7))):
        keys = (x[b : b + 1, start:end] for x in (k, v))
        wanted = attngen.attention(q[b : b + 1, :end], *keys)
        torch.testing.assert_close(found[b : b + 1, :end], wanted)
        assert not found[b, end:].any()
    assert not found[2].any()  # which begins where it would have to end


def test_recipes_measure_the_rows_of_sequences() -> None:
    q, k, v = (randn(2, 8, 2, 16, seed=n).bfloat16() for n in range(3))
    k[0, :2], v[0, :2] = 1e4, torch.nan
    begin = integers([2, 0])
    with fp8.autocast(recipe=fp8.Float8CurrentScaling()):
        found = attngen.attention(q, k, v, seqstart_kv=begin)
    wanted = attngen.attention(q, k, v, seqstart_kv=begin)
    assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "thd"}, "belong to three dense tensors"),
        ({"seqstart_q": integers([0])}, r"seqstart_q needs int32 or int64 \[b=2\]"),
        ({"seqstart_kv": torch.zeros(2)}, r"seqstart_kv needs .*; got torch.float32 \[2\]"),
        ({"cu_seqlens_q_padded": integers([0, 1, 2])}, "belongs to packed tokens"),
        ({"bias": torch.zeros(1, 1, 4, 4)}, "bias has a row for each row"),
        ({"schedule": attngen.Schedule()}, "schedule: lengths are made anew"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals_say_why(changes: dict[str, Any], reason: str) -> None:
    q = torch.zeros(2, 4, 2, DIM)
    with pytest.raises(SpecError, match=reason):
        attngen.attention(q, q, q, **{"seqstart_q": integers([0, 1]), **changes})


@pytest.mark.parametrize(
    ("queries", "given", "asked"),
    [
        (5, {}, OWN_NUMBER),
        (65, {}, None),
        (5, {"num_splits": 3}, 3),
        (5, {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}, None),
    ],
    ids=str,
)
def test_keys_are_split_where_those_of_whole_tensors_are(
    queries: int, given: dict[str, Any], asked: int | None
) -> None:
    q, k = (randn(3, rows, 4, 16, seed=rows).bfloat16() for rows in (queries, 300))
    call = make_call("attention", ROWS, {"q": q, "k": k, "v": k}, {**given, "seqstart_kv": STARTS})
    made: dict[str, Any] = {}

    def attend(**arguments: Any) -> Tensor:
        made.update(arguments)
        return arguments["q"]

    left_padding.attend(attend, call)
    assert made["layout"] == "thd" and made.get("num_splits") == asked
