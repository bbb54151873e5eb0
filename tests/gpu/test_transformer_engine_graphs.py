"""Captures of TransformerEngine's interface beside Python's collector, and after errors."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from attngen import te
from tests.support import te_kit
from tests.support.te_kit import Case, Shape

from . import oracle

pytestmark = [pytest.mark.gpu, pytest.mark.device]


def graphed_module() -> tuple[Any, list[torch.Tensor]]:
    """A module whose calls replay graphs, and inputs of it."""
    shape = Shape(2, 4, 2, 70, 90, 64, 64, (70, 70), (90, 90))
    case = Case("bshd_bshd_bshd", "causal", shape=shape)
    module = te_kit.module_of(case)
    qkv = [x.to(oracle.DEVICE) for x in te_kit.operands(case, dtype=torch.bfloat16)]
    te.make_graphed_callables(module, tuple([x.clone().requires_grad_() for x in qkv]))
    return module, [x.requires_grad_() for x in qkv]


def test_a_graph_dropped_in_a_cycle_does_not_end_a_capture() -> None:
    """The work that is captured drops the cycle, and every allocation would have it collected."""
    dropped: list[Any] = [graphed_module()]
    dropped.append(dropped)
    held, threshold = [dropped], gc.get_threshold()
    del dropped

    def work(x: torch.Tensor) -> torch.Tensor:
        held.clear()
        for _ in range(100):
            x = x + 1
            [[] for _ in range(100)]
        return x

    x = torch.zeros(8, device=oracle.DEVICE)
    gc.set_threshold(1)
    try:
        replayed = te.make_graphed_callables(work, (x,), num_warmup_iters=0)
    finally:
        gc.set_threshold(*threshold)
    assert not held and torch.equal(replayed(x + 1), torch.full_like(x, 101))


def test_a_capture_that_fails_leaves_states_streams_and_graphs_usable() -> None:
    """Waiting for a stream that is captured is an error, after which no capture can be ended."""
    module, qkv = graphed_module()
    expected = module(*qkv).clone()
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    stream = torch.cuda.current_stream()
    torch.cuda.manual_seed(3)
    draws = torch.randn(4, device=oracle.DEVICE)

    class Waits(torch.nn.Module):
        rng_states_tracker = tracker

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.dropout(x)
            torch.cuda.current_stream().synchronize()
            return x

    torch.cuda.manual_seed(3)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        te.make_graphed_callables(Waits(), (qkv[0].detach(),), num_warmup_iters=0)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.randn(4, device=oracle.DEVICE), draws)
    with tracker.fork():
        torch.randn(4, device=oracle.DEVICE)
    assert torch.equal(module(*qkv), expected)
    torch.cuda.empty_cache()
    again, _ = graphed_module()
    assert torch.equal(again(*qkv), expected)
