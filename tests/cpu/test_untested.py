"""Calls do not reach kernels that have not passed the GPU tests, unless they are let."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import AttentionSpec, SpecError, untested
from attngen.ops import choice, frontend

WAITING = {
    "alibi_slopes": {"alibi_slopes": True},
    "softcap": {"softcap": 30.0},
    "softmax": {"softmax": "off_by_one"},
    "max_logit": {"return_max_logit": True},
    "dropout": {"dropout_p": 0.1},
    "mask": {"attn_mask": torch.ones(5, 5, dtype=torch.bool)},
    "num_splits": {"num_splits": 2},
    "padding": {"mask": "padding", "seqused_kv": torch.tensor([3, 5], dtype=torch.int32)},
}


@pytest.fixture
def closed(monkeypatch):
    monkeypatch.setattr(untested, "allowed", False)
    monkeypatch.setattr(choice, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(frontend, "_settled", {})
    monkeypatch.setattr(frontend, "_run_kernels", lambda *rest: "launched")


def operands():
    return [torch.randn(2, 5, 2, 16, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("name", WAITING)
def test_call_that_waits_is_refused_or_computed_by_the_reference(closed, name):
    with pytest.raises(SpecError, match="have not passed the GPU tests yet.*ATTNGEN_UNTESTED"):
        attngen.attention(*operands(), **WAITING[name], backend="cuda")
    result = attngen.attention(*operands(), **WAITING[name])
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == (2, 5, 2, 16)


def test_call_that_was_tested_or_is_let_through_is_launched(closed, monkeypatch):
    assert attngen.attention(*operands(), mask="causal", window=(3, 0)) == "launched"
    monkeypatch.setattr(untested, "allowed", True)
    assert attngen.attention(*operands(), softcap=30.0) == "launched"


def test_packed_tokens_wait():
    assert not untested.find(AttentionSpec(64, layout="thd")), "let through by the tests' fixture"


def test_packed_tokens_wait_where_they_are_not_let_through(closed):
    (reason,) = untested.find(AttentionSpec(64, layout="thd"))
    assert reason.startswith("variable lengths")
