"""Sums of gradients of keys: the first ones are written, whatever was there, and others added."""

from __future__ import annotations

import pytest
import torch

from attngen.call.context.packed import Sent
from attngen.call.context.steps import Span
from attngen.frontends.pytorch.context.returns import KeySums
from attngen.frontends.pytorch.context.together import add_tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_what_comes_first_is_written_and_the_rest_added(dtype) -> None:
    k, v = torch.full((2, 7, 1, 3), torch.nan), torch.full((2, 7, 1, 2), torch.nan)
    sums = KeySums(k, v, torch.float64)
    wanted = torch.zeros(7)

    def pair(span: Span, number: float) -> tuple[torch.Tensor, torch.Tensor]:
        wanted[slice(*span)] += number
        dk, dv = (x.new_full((2, len(span), *x.shape[2:]), number) for x in (k, v))
        return dk, dv

    place = sums.place(Span(0, 2))
    assert place is not None
    for x, made in zip(place, pair(Span(0, 2), 1), strict=True):
        x.copy_(made)
    sums.take(Span(0, 2), place, place)
    sums.add(Span(1, 5), pair(Span(1, 5), 2))
    assert sums.place(Span(3, 6)) is None and sums.place(Span(5, 6)) is not None
    sums.take(Span(4, 6), pair(Span(4, 6), 4), None)
    sums.add(Span(0, 5), pair(Span(0, 5), 8))
    for x in sums.end(dtype):
        assert x.dtype == dtype
        assert torch.equal(x, wanted.to(dtype)[None, :, None, None].expand_as(x))


@pytest.mark.parametrize("runs", [((0, 3),), ((0, 2), (4, 5))], ids=str)
def test_narrow_messages_are_added_to_wide_sums(runs) -> None:
    """Messages of packed tokens have `reduce_dtype`."""
    sent = Sent(tuple(Span(*run) for run in runs), 3, False)
    made = torch.arange(1.0, 4.0).view(1, 3, 1, 1).bfloat16()
    sums = torch.ones(1, 6, 1, 2), torch.ones(1, 6, 1, 1)
    add_tokens(sums, (made.expand(1, 3, 1, 2), made), sent)
    wanted = torch.ones(6)
    wanted[[token for run in runs for token in range(*run)]] += torch.arange(1.0, 4.0)
    assert all(torch.equal(x, wanted.view(1, 6, 1, 1).expand_as(x)) for x in sums)
