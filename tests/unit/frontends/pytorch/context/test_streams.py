"""Rounds keep the rules of capture, whatever is raised among them."""

from __future__ import annotations

from contextlib import closing
from itertools import product
from typing import Any

import pytest
import torch

from attngen.call.context.order import Order
from attngen.call.context.steps import Length
from attngen.call.context.visits import Bands
from attngen.frontends.pytorch.context.arrivals import forward_rounds
from attngen.frontends.pytorch.context.lanes import Lanes
from attngen.frontends.pytorch.context.messages import Around
from attngen.frontends.pytorch.context.parts import Rows, Sequences
from attngen.frontends.pytorch.context.plans import both_rounds_of, plans_of
from attngen.frontends.pytorch.context.returns import sums_of_rounds
from tests.support.fake_streams import CaptureError, Device

ROOM, CAUSAL = 192, Bands("causal")


class Silent(Around):
    """A rank whose messages are asked for and never come; asking may fail."""

    device: Device
    fails_at: tuple[int, ...] = ()

    def ask(self, steps: Any, own: Any, rooms: Any) -> list[Any]:
        self.device.current.work()
        if set(steps) & set(self.fails_at):
            raise MemoryError("a message")
        return []

    def give(self, steps: Any, made: Any, like: Any, dtype: Any) -> Any:
        return [], []


def silent(device: Device, ranks: int, rank: int, fails_at: tuple[int, ...] = ()) -> Silent:
    order, lengths = Order("dual_chunk", ranks), (Length.of(ROOM),)
    rounds = both_rounds_of(order, lengths, CAUSAL, rank, ROOM // ranks // 4)
    rows = Rows(slice(None), slice(None))
    plans = plans_of(order, lengths, CAUSAL, False)
    found = Silent(None, rank, plans, (Sequences(rows, rows, 0),), *rounds)
    object.__setattr__(found, "device", device)
    object.__setattr__(found, "fails_at", fails_at)
    return found


def forward(around: Silent, device: Device, fails_in: int | None = None) -> int:
    """Compute what comes, and raise in some part. Returns: how many parts there were."""
    k, v = torch.zeros(2, 1, ROOM // len(around.plans), 1, 8)
    rounds, count = around.rounds, 0
    assert rounds is not None
    lanes = Lanes(k, rounds.cut, several=True)
    with lanes, closing(forward_rounds(around, k, v)) as arriving:
        for visits in arriving:
            lanes.begin()
            for visit, part in [(x, part) for x in visits for part in x.parts]:
                ((own_k, own_v),) = visit.held
                with lanes.of(part.queries, (own_k, own_v)):
                    device.current.work()
                    if count == fails_in:
                        raise ValueError("a part")
                count += 1
    return count


RANKS = [(ranks, rank) for ranks in (2, 3, 4, 8) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "rank"), RANKS)
def test_capture_ends_with_nothing_left(ranks: int, rank: int) -> None:
    device = Device()
    with device.in_force(), device.capture():
        around = silent(device, ranks, rank)
        assert forward(around, device) >= 2
        k, v = torch.zeros(2, 1, ROOM // ranks, 1, 8)
        assert around.returning is not None
        made = lambda visit: visit.into or tuple(x.float() for x in visit.held[0])  # noqa: E731
        sums_of_rounds(around, around.returning, (k, v), made, (torch.float32,) * 3)
    assert {*device.beside} == {"messages", "queries that wait"}


@pytest.mark.parametrize(("ranks", "fails_in"), [*product((2, 4), range(3))])
def test_what_a_part_raises_is_what_is_raised(ranks: int, fails_in: int) -> None:
    device = Device()
    with device.in_force(), pytest.raises(ValueError, match="a part"), device.capture():
        forward(silent(device, ranks, 0), device, fails_in)


@pytest.mark.parametrize(("ranks", "step"), [(2, 1), (4, 1), (4, 3)])
def test_what_a_message_raises_is_what_is_raised(ranks: int, step: int) -> None:
    device = Device()
    with device.in_force(), pytest.raises(MemoryError, match="a message"), device.capture():
        forward(silent(device, ranks, 0, (step,)), device)


def test_rules_of_capture() -> None:
    device = Device()
    beside = device.stream_of(None, "beside")
    beside.work()
    with pytest.raises(CaptureError, match="not captured"), device.capture():
        device.current.wait_stream(beside)
    with pytest.raises(CaptureError, match="ends before beside"), device.capture():
        beside.wait_stream(device.current)
        beside.work()
