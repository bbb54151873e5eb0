"""Launches at the same time, from several streams and threads, disturb nobody."""

from __future__ import annotations

import threading

import pytest
import torch
from cuda.bindings import driver

import attngen
from attngen.frontends.pytorch import operation
from attngen.runtime import counters

from . import cases, oracle
from .oracle import run, same

pytestmark = [pytest.mark.gpu, pytest.mark.device]
KERNELS = cases.core_specs(64, 128, 256)


def test_launch_eight_streams_at_once_are_right(workloads):
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()
    found = []
    for turn in range(20):
        for number, stream in enumerate(streams):
            which = (turn + number) % len(workloads)
            with torch.cuda.stream(stream):
                found.append((which, run(workloads[which][0])))
    torch.cuda.synchronize()
    assert all(same(results, workloads[which][1]) for which, results in found)


def in_threads(*functions) -> None:
    """Runs each function in a thread of its own and raises what any of them raised."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # handed on to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_launch_eight_threads_on_their_own_streams_are_right(workloads):
    torch.cuda.synchronize()
    gate = threading.Barrier(8)

    def work(number):
        stream = torch.cuda.Stream()
        gate.wait()
        with torch.cuda.stream(stream):
            for turn in range(20):
                tensors, wanted = workloads[(number + turn) % len(workloads)]
                results = run(tensors)
                stream.synchronize()
                assert same(results, wanted), f"thread {number}, turn {turn}"

    in_threads(*(lambda n=n: work(n) for n in range(8)))


def test_launch_threads_sharing_one_stream_and_kernel_are_right(workloads):
    torch.cuda.synchronize()
    picked = [workloads[n] for n in (0, 2, 5)]  # one kernel, three shapes
    found = []

    def work(number):
        for _ in range(30):
            tensors, wanted = picked[number % 3]
            found.append((run(tensors), wanted))

    in_threads(*(lambda n=n: work(n) for n in range(6)))
    torch.cuda.synchronize()
    assert len(found) == 180 and all(same(results, wanted) for results, wanted in found)


def test_launch_thread_that_never_touched_the_device_is_right(workloads):
    """A new thread has no current context; memory from the allocator's cache does not make one."""
    tensors, wanted = workloads[1]
    for _ in range(3):
        run(tensors)
    found = []
    in_threads(lambda: found.append(run(tensors)))
    assert same(found[0], wanted)


def test_launch_thread_that_lost_its_context_is_right(workloads):
    """Other users of the driver push and pop contexts behind torch's back."""
    tensors, wanted = workloads[1]
    found = []

    def work():
        found.append(run(tensors))
        (status,) = driver.cuCtxSetCurrent(driver.CUcontext(0))
        assert int(status) == 0
        found.append(run(tensors))

    in_threads(work)
    assert len(found) == 2 and all(same(results, wanted) for results in found)


def counter_on(handle: int) -> int:
    """The tile counter of a launch on the stream of this handle, which torch has not made."""
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        return operation.tile_counter(0, handle)


def test_per_thread_default_streams_share_no_counter():
    per_thread, found = int(driver.CU_STREAM_PER_THREAD), []
    gate = threading.Barrier(4)

    def work():
        gate.wait()  # all are alive at once
        found.append({counter_on(per_thread) for _ in range(3)})
        gate.wait()

    in_threads(*[work] * 4)
    assert all(len(each) == 1 for each in found) and len(set.union(*found)) == 4


def test_stream_made_anew_has_another_counter_and_launches_right(workloads):
    """A destroyed stream's handle is given again, while its last launch may still run."""
    found = []
    for turn in range(4):
        status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        assert int(status) == 0
        tensors, wanted = workloads[turn % len(workloads)]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
            results = run(tensors)
            found.append(counter_on(int(stream)))
        torch.cuda.synchronize()
        assert same(results, wanted)
        assert int(driver.cuStreamDestroy(stream)[0]) == 0
    assert len(set(found)) == 4


def test_launch_operands_at_ever_new_addresses_are_right():
    """Tensor maps are kept by address, so another address, shape or stride needs another."""
    size = 2 * 130 * 2 * 64
    memory = torch.randn(4 * size, device=oracle.DEVICE).to(torch.bfloat16)
    for offset in range(0, size, 5000 * 8):
        for shape in ((2, 130, 2, 64), (1, 260, 2, 64), (2, 65, 4, 64)):
            q, k, v = (memory[offset + n * size :][:size].view(shape) for n in range(3))
            oracle.check(*run((q, k, v)), oracle.truth(q, k, v, mask="causal"))


def test_launch_threads_building_one_kernel_at_once_are_right(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    tensors = oracle.operands(1, 2, 2, 140, 140, 88, 24)
    found = []
    in_threads(*(lambda: found.append(run(tensors)) for _ in range(8)))
    torch.cuda.synchronize()
    expected = oracle.truth(*tensors, mask="causal")
    for out, lse in found:
        oracle.check(out, lse, expected)


def test_launch_result_is_ordered_on_the_callers_stream():
    """Operands made late on the same stream, outputs read early: no launch runs ahead or behind."""
    stream = torch.cuda.Stream()
    q, k, v = oracle.operands(2, 4, 4, 1000, 1000, 64)
    wanted, _ = run((q, k, v))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.full_like(q, float("nan"))
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        out, _ = run((late, k, v))
        kept = out.clone()
        late.fill_(float("nan"))
    stream.synchronize()
    assert torch.equal(kept, wanted)


def test_first_output_alone_in_a_thread_without_a_context_is_right():
    """Its other outputs go where nobody reads, memory that this thread is the first to need."""
    q, k, v = oracle.operands(1, 3, 3, 72, 72, 128)
    wanted, _ = attngen.attention(q, k, v, backend="cuda", return_lse=True)
    found = []
    counters._unread.clear()
    in_threads(lambda: found.append(attngen.attention(q, k, v, backend="cuda")))
    assert torch.equal(found[0], wanted)
