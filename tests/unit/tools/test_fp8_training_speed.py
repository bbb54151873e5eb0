"""The tool that times steps in FP8: what it runs, by the reference on a CPU."""

from __future__ import annotations

import pytest
import torch

from attngen import fp8
from tools import fp8_training_speed as tool
from tools.fp8_backward_speed import Case


def test_steps_give_gradients_in_16_bits() -> None:
    made = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 9, 2, 16, generator=made).bfloat16() for _ in range(4)]
    calls = tool.calls_of(
        [*(x.requires_grad_() for x in tensors[:3]), tensors[3]], "causal", "auto"
    )
    del calls["casts"]  # which are by kernels
    results = {name: call() for name, call in calls.items()}
    assert all(isinstance(x, fp8.Float8Tensor) for x in tool.stored(tensors[:3]))
    wide = results["bf16"]
    for name, found in results.items():
        for x, y in zip(found, wide, strict=True):
            assert x.dtype == torch.bfloat16 and (x - y).norm() < 0.2 * y.norm(), name
    assert not torch.equal(results["current"][0], results["current, 8 bits"][0])
    assert torch.equal(results["stored, 8 bits"][0], results["current, 8 bits"][0])


def test_row_has_rates_beside_bfloat16() -> None:
    replayed = {"graph: bf16": 1.0, "graph: current": 0.5, "graph: casts": 0.1}
    called = {"bf16": 2.0, "current": 1.6, "casts": 0.1}
    row = tool.row_of(Case(1, 1024, 128, "none"), called | replayed)
    assert row["to_bf16"] == {"current": 1.25, "graph: current": 2.0}
    assert not {"casts", "graph: casts"} & {*row["tflops"]}
    assert row["tflops"]["bf16"] == pytest.approx(14 * 16 * 1024**2 * 128 / 2e9, abs=0.1)


def test_command_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tool.main([])
