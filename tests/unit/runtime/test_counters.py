"""Which launches share a tile counter: those of one stream, whatever handle it goes by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attngen.errors import LaunchError
from attngen.frontends.pytorch import checked_call, operation
from attngen.runtime import counters, load

DEVICE = torch.device("cuda", 0)


class Driver:
    """Hands out slabs far apart, and knows the streams that handles name at the time."""

    def __init__(self) -> None:
        self.slabs = 0
        self.identities: dict[int, int] = {}
        self.asked: list[int] = []

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        self.slabs += 1
        return 0, self.slabs << 20

    def cuMemsetD32(self, address: int, value: int, count: int) -> tuple[int]:
        assert value == 0 and count == counters.SLAB_COUNTERS
        return (0,)

    def cuCtxSynchronize(self) -> tuple[int]:
        return (0,)

    def cuStreamGetId(self, stream: int) -> tuple[int, int]:
        self.asked.append(stream)
        if stream not in self.identities:
            return SimpleNamespace(name="CUDA_ERROR_INVALID_HANDLE"), 0
        return 0, self.identities[stream]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(counters, "driver", lambda: stand_in)
    for known in ("_addresses", "_free"):
        monkeypatch.setattr(counters, known, {})
    return stand_in


@pytest.fixture
def counter_of(monkeypatch: pytest.MonkeyPatch, driver: Driver):
    """The counter of a launch on the current stream, given its handle and torch's id of it."""
    current = SimpleNamespace(stream_id=0)
    monkeypatch.setattr(operation, "is_capturing", lambda: False)
    monkeypatch.setattr(load, "ensure_context", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)

    def found(handle: int, torch_id: int) -> int:
        current.stream_id = torch_id
        return operation.tile_counter(DEVICE.index, handle)

    return found


def test_a_stream_keeps_its_counter_and_streams_share_none(counter_of, driver):
    streams = [(0, 0), (0x1000, 3), (0x2000, 35), (0x3000, 0x3000)]
    driver.identities[0x3000] = 9
    found = [counter_of(*each) for each in streams]
    assert len(set(found)) == len(streams)
    assert found == [counter_of(*each) for each in streams]


def test_torchs_own_streams_are_never_asked_for(counter_of, driver):
    for _ in range(3):
        counter_of(0, 0)
        counter_of(0x1000, 3)
    assert driver.asked == []


def test_a_per_thread_default_stream_has_the_counter_of_its_thread(counter_of, driver):
    driver.identities[2] = 11
    first = counter_of(2, 2)
    driver.identities[2] = 12  # another thread
    second = counter_of(2, 2)
    driver.identities[2] = 11
    assert first != second and counter_of(2, 2) == first


def test_a_stream_made_anew_at_a_handle_has_another_counter(counter_of, driver):
    driver.identities[0x5000] = 21
    first = counter_of(0x5000, 0x5000)
    driver.identities[0x5000] = 22
    again = counter_of(0x5000, 0x5000)
    pooled = counter_of(0x5000, 67)  # torch made a pool's stream there
    assert len({first, again, pooled}) == 3
    assert counter_of(0x5000, 67) == pooled


def test_identities_are_no_handles(counter_of, driver):
    driver.identities[0x5000] = 0x1000
    assert counter_of(0x5000, 0x5000) != counter_of(0x1000, 3)
    driver.identities[0x6000] = 0
    assert counter_of(0x6000, 0x6000) != counter_of(0, 0)


def test_a_stream_that_the_driver_does_not_know_is_refused(counter_of):
    with pytest.raises(LaunchError, match="identity of a stream: CUDA_ERROR_INVALID_HANDLE"):
        counter_of(0x7000, 0x7000)


def test_default_slopes_are_there_before_another_stream_may_read_them(monkeypatch):
    waits: list[torch.device] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(DEVICE))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(checked_call, "_slopes", {})
    monkeypatch.setattr(checked_call, "unobserved", lambda tensors: True)
    monkeypatch.setattr(
        checked_call.reference, "default_alibi_slopes", lambda heads, device: torch.ones(heads)
    )
    q = SimpleNamespace(device=DEVICE, is_cuda=True)
    assert checked_call.default_slopes(4, q) is checked_call.default_slopes(4, q)
    assert waits == [DEVICE]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    checked_call.default_slopes(8, q)
    assert waits == [DEVICE] and list(checked_call._slopes) == [(4, DEVICE)]
