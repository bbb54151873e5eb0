"""Specs that are derived from calls: arguments are known by name, and traces follow."""

from __future__ import annotations

import pytest
import torch

import attngen


def test_from_call_refuses_what_is_no_argument() -> None:
    q = torch.zeros(1, 200, 1, 8)
    with pytest.raises(attngen.SpecError, match="'maks'"):
        attngen.AttentionSpec.from_call(q, q, q, maks="causal")


def test_from_call_compiles_without_a_break() -> None:
    def head_dim(q: torch.Tensor) -> torch.Tensor:
        return q * attngen.AttentionSpec.from_call(q, q, q, mask="causal", window=(3, 0)).head_dim

    q = torch.ones(1, 200, 1, 8)
    assert torch.compile(head_dim, fullgraph=True, backend="eager")(q)[0, 0, 0, 0] == 8
