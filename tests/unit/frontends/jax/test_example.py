"""The example trains alike on attngen and on jax.nn, and fails where it does not."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip("jax")

from tests.support.paths import ROOT  # noqa: E402


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, of a smaller model."""
    path = ROOT / "examples" / "04_train_jax.py"
    spec = importlib.util.spec_from_file_location("train_jax", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"LAYERS": 2, "WIDTH": 32, "HEADS_Q": 2, "HEADS_KV": 1, "HEAD_DIM": 8, "LENGTH": 16}
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    return module


@pytest.mark.slow
def test_losses_are_those_of_jax(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--steps", "2"]) == 0
    assert "attngen    jax.nn" in capsys.readouterr().out


def test_losses_that_part_fail(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"attngen": [5.0, 4.0], "jax.nn": [5.0, 4.0 + 2 * example.TOLERANCE]}
    monkeypatch.setattr(example, "train", lambda name, steps: losses[name])
    assert example.main(["--steps", "2"]) == 1
