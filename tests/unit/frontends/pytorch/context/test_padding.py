"""Padded sequences beside a bias or a mask: parts of all are one call, which cuts their lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen.call.context.order import Order
from attngen.call.context.steps import Part, Span
from attngen.frontends.pytorch.context.calls import Ranks, asked_of, context_call, features_of
from attngen.frontends.pytorch.context.padding import Padding
from attngen.frontends.pytorch.context.parts import Sequences

BATCH, ROOM = 7, 32


def call_of(**given: Any) -> Any:
    """The call of the first of two ranks, whose sequences have 1 to 7 quarters of 32 positions."""
    used = torch.arange(1, BATCH + 1, dtype=torch.int32) * 4
    given = {"seqused_q": used, "seqused_kv": used, "backend": "reference", **given}
    q = torch.empty(BATCH, ROOM // 2, 2, 8)
    asked = asked_of(q, q, q, given, 2)
    features = features_of(asked, None, 0, 2)
    order, ranks = Order("dual_chunk", 2), Ranks(None, 2, 0)
    return context_call(asked, order, ranks, False, features, torch.float32)


@pytest.mark.parametrize("name", ["bias", "attn_mask"])
def test_all_sequences_are_one_part(name: str) -> None:
    dtype = torch.float32 if name == "bias" else torch.bool
    call = call_of(mask="causal", **{name: torch.zeros(1, 1, ROOM // 2, ROOM, dtype=dtype)})
    (one,) = call.sequences
    assert isinstance(one, Sequences) and len(call.used) == BATCH
    own, others = ([*step.parts] for step in call.messages.plans[0])
    assert len(own) == 3 and len(others) == 1  # chunks 0 and 3, and chunk 3 over 1 and 2
    used = [len(span) for _, span in call.used]
    assert used == [4, 8, 8, 8, 8, 8, 12]  # of 8 first positions and 8 last ones


def test_diagonals_at_the_ends_of_lengths_are_parts_of_their_own() -> None:
    used = torch.full((BATCH,), ROOM, dtype=torch.int32)
    bias = torch.zeros(1, 1, ROOM // 2, ROOM)
    call = call_of(mask="causal_bottom_right", bias=bias, seqused_kv=used)
    assert len(call.sequences) == BATCH and call.features.padding is None


def test_lengths_are_cut_where_parts_begin_and_end() -> None:
    padding = Padding((3, 9, 16), (16, 0, 5), torch.device("cpu"))
    part = Part(0, Span(0, 4), Span(2, 8), 0, None, None)
    with pytest.raises(AssertionError):
        padding.of_part(part)
    placed = Part(0, Span(0, 4), Span(2, 8), 0, None, None, origin=(8, 2))  # type: ignore[arg-type]
    found = {name: x.tolist() for name, x in padding.of_part(placed).items()}
    assert found == {"seqused_q": [0, 1, 4], "seqused_kv": [6, 0, 3]}
    whole = {name: x.tolist() for name, x in padding.of_all.items()}
    assert whole == {"seqused_q": [3, 9, 16], "seqused_kv": [16, 0, 5]}
