"""Gradients of rows whose keys come in parts: sums of all parts are those of one call."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec, CacheError
from attngen.call.prepare import parts as prepare_parts
from attngen.frontends.pytorch.backward_parts import RowSums

from . import gradients, oracle

pytestmark = pytest.mark.gpu
STATE = (5, 6)


class Part(NamedTuple):
    """The first of a part's rows, its keys, and what it says."""

    row: int
    keys: slice
    given: dict[str, Any]


BEGIN, REST = slice(0, 128), slice(128, None)
DROPPED = {"dropout_p": 0.2}
# A head dim, the length of queries and keys, parts of causal calls, and what all of them say.
CASES = [
    (128, 192, [Part(0, BEGIN, {}), Part(128, REST, {"positions": "128 128 0 0 0"})], {}),
    (64, 300, [Part(0, BEGIN, {}), Part(128, REST, {"positions": "128 128 0 0 0"})], DROPPED),
]
KERNELS = [
    AttentionSpec(
        head_dim=128, mask="causal", grad_dtype="fp32", positions=placed, directions=("bwd",)
    )
    for placed in (False, True)
]


def run(dim: int, length: int, given: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any], Any]:
    """q, k, v, d_o, the arguments of a causal call, and the sums of its rows, of whose LSE there is
    a gradient."""
    q, k, v = oracle.operands(2, 4, 2, length, length, dim, dim, torch.bfloat16)
    arguments = {**given, "mask": "causal"}
    if given:
        arguments["rng_state"] = torch.tensor(STATE, device=oracle.DEVICE)
    out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    d_o = oracle.randn(*out.shape, dtype=out.dtype, seed=9)
    dlse = oracle.randn(*aux.lse.shape, dtype=torch.float32, seed=10)
    return [q, k, v, d_o, dlse], arguments, RowSums(q, out, aux.lse, d_o, dlse)


@pytest.mark.parametrize(("dim", "length", "parts", "given"), CASES, ids=str)
def test_parts_sum_up_to_one_call(dim, length, parts, given):
    (q, k, v, d_o, dlse), arguments, sums = run(dim, length, given)
    totals = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
    for part in parts:
        keys = k[:, part.keys], v[:, part.keys]
        into = tuple(torch.full_like(x, torch.nan, dtype=torch.float32) for x in keys)
        own = {**arguments, **part.given, "out_dtype": "float32"}
        assert sums.add(part.row, q[:, part.row :], keys, into, own)
        for total, x in zip(totals, into, strict=True):
            total[:, part.keys] += x
    made = [x.to(q.dtype) for x in (sums.end(), *totals)]
    gradients.check(made, [q, k, v, d_o], dlse, **arguments)


@pytest.mark.parametrize(
    ("dim", "row", "given"),
    [
        (128, 32, {}),
        pytest.param(256, 0, {}, marks=pytest.mark.wgmma),
        pytest.param(52, 0, {}, marks=pytest.mark.wgmma),
        (128, 0, {"deterministic": True}),
    ],
    ids=str,
)
def test_rows_that_kernels_keep_no_sums_of_are_left_alone(dim, row, given):
    """No whole blocks, no sums in memory, or sums in an order."""
    (q, k, v, *_), arguments, sums = run(dim, 192, {})
    into = tuple(torch.full_like(x, torch.nan, dtype=torch.float32) for x in (k, v))
    own = {**arguments, **given, "out_dtype": "float32"}
    assert not sums.add(row, q[:, row:], (k, v), into, own)
    assert sums.end() is None and all(x.isnan().all() for x in into)


def test_sums_are_rounded_as_they_end():
    (q, k, v, _, _), _, sums = run(128, 192, {})
    into = tuple(torch.empty_like(x, dtype=torch.float32) for x in (k, v))
    assert sums.add(0, q, (k, v), into, {"mask": "causal", "out_dtype": "float32"})
    wide, narrow = sums.end(), sums.end(rounds=True)
    assert narrow.dtype == q.dtype and torch.equal(narrow, wide.to(q.dtype))


def test_sums_without_a_kernel_that_rounds_stay_float32(monkeypatch):
    """Where kernels may not be built, those of other gradients may be missing."""
    (q, k, v, _, _), _, sums = run(128, 192, {})
    into = tuple(torch.empty_like(x, dtype=torch.float32) for x in (k, v))
    assert sums.add(0, q, (k, v), into, {"mask": "causal", "out_dtype": "float32"})
    missing = mock.Mock(side_effect=CacheError("no kernel"))
    monkeypatch.setattr(prepare_parts, "choose", missing)
    prepared = sums._first
    assert isinstance(prepared, prepare_parts.PreparedPart)
    vars(prepared).pop("rounded", None)  # which an earlier call may have found
    assert sums.end(rounds=True).dtype == torch.float32
    vars(prepared).pop("rounded", None)
