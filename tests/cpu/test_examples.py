"""The programs in examples/ run on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def train(monkeypatch):
    """The module examples/02_train.py, on the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("train", EXAMPLES / "02_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_first_example_runs(capsys):
    runpy.run_path(str(EXAMPLES / "01_attention.py"))
    assert "out (2, 512, 8, 128)" in capsys.readouterr().out


def test_training_learns_alike_on_both_backends_and_writes_what_it_saw(train, tmp_path):
    pytest.importorskip("matplotlib")
    report, plot = tmp_path / "training.json", tmp_path / "training.svg"
    assert train.main(["--steps", "4", "--json", str(report), "--plot", str(plot)]) == 0
    read = json.loads(report.read_text())
    kernels, reference = read["losses"]["kernels"], read["losses"]["reference"]
    assert len(kernels) == 4 and kernels[-1] < kernels[0]
    assert kernels == reference and read["backends"]["kernels"] == "reference"
    assert "</svg>" in plot.read_text()


def test_training_whose_losses_part_fails(train, monkeypatch):
    losses = iter([[5.0, 4.0], [5.0, 4.0 + 2 * train.TOLERANCE]])
    monkeypatch.setattr(train, "train", lambda *_: next(losses))
    assert train.main([]) == 1
