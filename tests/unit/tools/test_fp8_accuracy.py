"""The accuracy tool: what it stores, what it counts as an error, and a run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import fp8_accuracy as tool

CPU = torch.device("cpu")


def test_originals_outliers_are_few_and_large() -> None:
    plain = tool.Case("normal", 64, 4, 500, 500)
    spoilt = tool.Case("outliers", 64, 4, 500, 500, outliers=True)
    for name, x in plain.originals(CPU).items():
        ratio = spoilt.originals(CPU)[name] / x
        changed = (ratio - 1).abs() > 1e-6
        assert 0.5e-3 < changed.float().mean() < 2e-3
        assert torch.allclose(ratio[changed], torch.tensor(tool.OUTLIER_FACTOR))


def test_store_uses_the_whole_range_of_e4m3() -> None:
    originals = tool.Case("normal", 64, 2, 300, 300).originals(CPU)
    stored, descales = tool.store(originals)
    for name, x in originals.items():
        assert stored[name].float().abs().max() == tool.LARGEST
        step = 2**-4 * x.abs() + 2**-10 * descales[name]
        assert ((stored[name].float() * descales[name] - x).abs() <= 1.001 * step).all()


def test_errors_are_root_mean_square_and_largest() -> None:
    exact, unstored = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])
    assert tool.errors(torch.tensor([3.0, 6.0]), exact, unstored) == {
        "rms": pytest.approx(12.5**0.5, rel=1e-3),
        "rmse": pytest.approx(2**0.5, rel=1e-3),
        "max_error": 2.0,
        "rmse_to_originals": pytest.approx(0.5**0.5, rel=1e-3),
    }


def test_measure_runner_that_refuses_has_a_reason_and_no_figures() -> None:
    def refuse(call: tool.Call) -> torch.Tensor:
        raise RuntimeError("no such head dim")

    case = tool.Case("normal", 64, 2, 40, 40)
    rows = tool.measure(case, {"cudnn": refuse, "emulation": tool.run_emulation}, CPU)
    missing = [row for row in rows if row["who"] == "cudnn"]
    assert [row["missing"] for row in missing] == ["RuntimeError: no such head dim"] * 2
    assert all("rmse" not in row for row in missing)


def test_run_without_gpu_measures_the_emulation(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "accuracy.json"
    options = ["--length", "96", "--keys", "500", "--heads", "2", "-o", str(path)]
    assert tool.main(options) == 0
    report = json.loads(path.read_text())
    assert set(report["absent"]) == {"attngen", "cudnn"}
    assert set(report["versions"]) == {"emulation"}
    assert len(report["rows"]) == 3 * 5 * 2
    for row in report["rows"]:
        # Weights of 4 bits err by 2^-4 at most, e4m3 outputs by as much again.
        assert 0 < row["rmse"] < 2**-3 * row["rms"]
        assert row["rmse"] <= row["max_error"]
