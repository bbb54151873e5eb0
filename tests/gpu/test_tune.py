"""`attngen tune` on a GPU: candidates are compared, timed and kept, and planning follows."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen import AttentionSpec
from attngen.bench.tune import Effort, tune
from attngen.cli.main import main
from attngen.errors import MeasureError
from attngen.fragments import features
from attngen.kernels import tuned
from attngen.kernels.plan import candidates, feasible
from attngen.spec import resolve
from attngen.targets.target import DEFAULT, TARGETS

pytestmark = [pytest.mark.gpu, pytest.mark.device]
KERNELS = [
    AttentionSpec(head_dim=64, mask="causal", window=True),
    AttentionSpec(head_dim=64, dtype="e4m3", out_dtype="e4m3"),
]
SPEC = '[[kernel]]\nhead_dim = 64\nmask = "causal"\nwindow = true\n'


@pytest.mark.wgmma
def test_tune_writes_what_planning_then_prefers(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setitem(TARGETS, DEFAULT.name, replace(DEFAULT, chip="here"))
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    options = ["--lengths", "256,700", "--window", "100", "--limit", "3", "--rounds", "2"]
    output = tmp_path / "here.json"
    result = CliRunner().invoke(
        main, ["tune", str(spec), *options, "--budget-ms", "1", "-o", str(output), "--json"]
    )
    assert result.exit_code == 0, result.output
    (entry,) = tuned.read(output).entries
    assert json.loads(result.stdout)["problem"]["masks"] == ["causal", "window"]
    assert (entry.lengths, entry.window) == ((256, 700), 100)
    assert 1 < len(entry.candidates) <= 3
    assert all(ms > 0 for each in entry.candidates for ms in each.ms.values())
    fastest = entry.ranked()[0][1].settings
    assert tuned.settings(candidates(entry.problem, "sm_90a")[0]) == fastest


def test_tune_wrong_candidate_is_not_timed(monkeypatch) -> None:
    """A kernel that is told to scale differently stands for one that computes something else."""
    (problem,) = resolve.resolve(KERNELS[0], features.scan())
    plans = feasible(problem, "sm_90a")
    from attngen.bench import tune as module

    original, seen = module.prepare, []

    def wrong_from_the_second(loaded, extents, scalars):
        seen.append(loaded)
        scale = scalars.softmax_scale * len(seen)
        return original(loaded, extents, dataclasses.replace(scalars, softmax_scale=scale))

    monkeypatch.setattr(module, "prepare", wrong_from_the_second)
    with pytest.raises(MeasureError, match="something else"):
        tune(problem, "sm_90a", Effort((256,), 64, 2, 1, 1.0))
    assert len(seen) == 2 and len(plans) >= 2


def test_tune_8_bit_plans_agree_and_are_timed() -> None:
    (problem,) = resolve.resolve(KERNELS[1], features.scan())
    entry = tune(problem, "sm_90a", Effort((512,), 64, 3, 2, 1.0)).entry
    assert len(entry.candidates) > 1
    assert all(ms > 0 for each in entry.candidates for ms in each.ms.values())
