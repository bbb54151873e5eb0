"""Each fragment is reached by a call: the arguments that ask for it, on the way to a kernel.

A new fragment fails here until a call of it stands in CALLS.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen import AttentionSpec
from attngen.fragments import features
from attngen.kernels.uses import uses_of
from attngen.spec.resolve import resolve

HEADS, LENGTH, DIM = 2, 96, 16
FRAGMENTS = {(axis, name) for axis, found in features.scan().items() for name in found}


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def dense(dim: int = DIM, **arguments: Any) -> dict[str, Any]:
    """A call of two sequences of LENGTH positions."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, LENGTH, HEADS, dim, generator=make).to(torch.bfloat16) for _ in range(3)
    )
    return {"q": q, "k": k, "v": v, **arguments}


def packed() -> dict[str, Any]:
    """A call of three sequences of 5, 0 and 91 packed tokens."""
    ends = int32(0, 5, 5, LENGTH)
    call = {name: tensor[0] for name, tensor in dense().items()}
    return {**call, "layout": "thd_thd_thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}


def paged() -> dict[str, Any]:
    """A call of two sequences whose keys and values lie on twelve pages of 16 positions."""
    call = dense()
    pages = {name: call[name].reshape(12, 16, HEADS, DIM) for name in ("k", "v")}
    table = torch.arange(12, dtype=torch.int32).flip(0).reshape(2, 6)
    lengths = int32(LENGTH, 40)
    return {
        **call,
        **pages,
        "layout": "paged_kv_bshd_bshd_bshd",
        "page_table": table,
        "seqused_kv": lengths,
    }


CALLS = {
    ("mask", "causal"): dense(mask="causal"),
    ("mask", "window"): dense(window=(8, 3)),
    ("score", "alibi"): dense(alibi_slopes=True, mask="causal"),
    ("score", "post_scale_bias"): dense(bias=torch.ones(1, HEADS, LENGTH, LENGTH).bfloat16()),
    ("score", "pre_scale_bias"): dense(
        bias=torch.ones(1, HEADS, LENGTH, LENGTH).bfloat16(), bias_type="pre_scale"
    ),
    ("score", "softcap"): dense(softcap=20.0),
    ("softmax", "learnable"): dense(softmax="learnable", sink=torch.zeros(HEADS)),
    ("softmax", "off_by_one"): dense(softmax="off_by_one"),
    ("softmax", "vanilla"): dense(),
    ("sequence", "dense"): dense(),
    ("sequence", "packed"): packed(),
    ("sequence", "used"): dense(seqused_q=int32(3, LENGTH), seqused_kv=int32(7, 1)),
    ("fetch", "gather"): dense(dim=15),
    ("fetch", "page_tma"): paged(),
    ("fetch", "tma"): dense(),
    ("iteration", "range"): dense(),
}


def test_every_fragment_has_a_call() -> None:
    assert set(CALLS) == FRAGMENTS


@pytest.mark.parametrize(("axis", "name"), sorted(CALLS))
def test_call_reaches_its_fragment(axis: str, name: str) -> None:
    """The kernel of the call's spec has the fragment, and the reference computes the call."""
    call = CALLS[axis, name]
    known = features.scan()
    (problem,) = resolve(AttentionSpec.from_call(**call), known)
    used = {use.fragment for uses in uses_of(problem, known).values() for use in uses}
    assert known[axis][name] in used
    assert attngen.attention(**call, backend="reference").isfinite().all()
