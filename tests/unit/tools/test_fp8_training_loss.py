"""The tool that trains in FP8 and in bfloat16: its task, its ways, and what it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tools import fp8_training_loss as tool


def test_second_half_repeats_the_first() -> None:
    first, other = tool.batches(1, 2)
    half = tool.LENGTH // 2
    assert first.shape == (tool.BATCH, tool.LENGTH) and torch.equal(
        first[:, half:], first[:, :half]
    )
    assert not torch.equal(first, other) and torch.equal(first, tool.batches(1, 1)[0])


def test_ways_differ_and_begin_alike() -> None:
    losses = {name: tool.train(0, 3, context, "cpu") for name, context in tool.contexts().items()}
    assert len({tuple(x) for x in losses.values()}) == 5
    begin = [first for first, *_ in losses.values()]
    assert max(begin) - min(begin) < 0.05


def test_report_and_figure_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tool, "train", lambda seed, steps, context, device: [3.0 - seed] * steps)
    report, figure = tmp_path / "losses.json", tmp_path / "losses.svg"
    arguments = ["-o", str(report), "--plot", str(figure), "--steps", "20", "--seeds", "2"]
    arguments += ["--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["fp8_training_loss.py", *arguments])
    tool.main()
    found = json.loads(report.read_text())
    assert (found["steps"], found["backend"]) == (20, "reference")
    assert [*found["losses"]] == [*tool.contexts()]
    assert all(seeds == [[3.0] * 20, [2.0] * 20] for seeds in found["losses"].values())
    assert "bfloat16 3.0000 2.0000" in capsys.readouterr().out
    assert "<svg" in figure.read_text()
