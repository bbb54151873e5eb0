"""The tool that measures gradients: its inputs, its refusals, and a run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attngen import reference
from tools import fp8_gradient_accuracy as tool

CPU = torch.device("cpu")


def test_trained_inputs_have_a_sink_sized_channels_and_small_gradients() -> None:
    plain = tool.Case("normal", 64, 2, 200, 200).originals(CPU)
    made = tool.Case("trained", 64, 2, 200, 200, trained=True).originals(CPU)
    weights = (made["q"] * made["k"][:, :1]).sum(-1) > (made["q"] * made["k"][:, 1:2]).sum(-1)
    assert weights.float().mean() > 0.7, "queries look at the first key"
    sizes = made["v"].square().mean((0, 1, 2))
    assert sizes.max() > 10 * sizes.median()
    assert made["d_o"].abs().max() < 1e-2 < plain["d_o"].abs().max()


def test_runner_that_refuses_has_a_reason_and_no_figures() -> None:
    def refuse(call: tool.Call) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("head dim 64")

    runners = {"cudnn": refuse, "emulation": tool.run_emulation}
    rows = tool.measure(tool.Case("normal", 64, 1, 40, 40), runners, CPU)
    assert [row.get("missing") for row in rows] == ["RuntimeError: head dim 64", None] * 2
    assert rows[0]["gradients"] == "bf16" and "to_stored" not in rows[0]


def test_exact_gradients_are_those_of_what_is_stored() -> None:
    case = tool.Case("normal", 64, 1, 30, 30, mask="causal")
    tensors = case.originals(CPU)
    out, dq, _, _ = tool.exact_of(case, tensors)
    assert dq.dtype == torch.float64
    q, k, v = (tensors[name].double() for name in "qkv")
    assert torch.equal(out, reference.attention(q, k, v, mask="causal")[0])


def test_run_without_gpu_measures_the_emulation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "gradients.json"
    options = ["--length", "96", "--keys", "300", "--heads", "1", "-o", str(path)]
    assert tool.main(options) == 0
    report = json.loads(path.read_text())
    assert set(report["absent"]) == {"attngen", "cudnn"} and len(report["rows"]) == 2 * 5 * 2
    for row in report["rows"]:
        assert all(0.5 < x < 25 for x in row["to_stored"].values()), row
        assert row["to_originals"]["dv"] >= 0.9 * row["to_stored"]["dv"]
