"""The tool that compares ways to train in FP8: its inputs, its errors, and an order of its rows."""

from __future__ import annotations

import torch

from tools import fp8_training_accuracy as tool


def test_inputs_have_their_sizes_and_outliers() -> None:
    plain = tool.Inputs("plain", 300, "none").tensors(1)
    other = tool.Inputs("other", 300, "none", outliers=10.0, size=0.5).tensors(1)
    for x, y, size in zip(plain, other, (0.5, 0.5, 0.5, 1.0), strict=True):
        assert x.dtype == torch.bfloat16 and x.shape == (1, 300, 2, 128)
        changed = ((y.float() / x.float() / size) - 1).abs() > 0.1
        assert 0.2e-3 < changed.float().mean() < 3e-3


def test_errors_are_relative_and_in_per_cent() -> None:
    assert tool.errors((torch.tensor([3.0, 5.0]),), (torch.tensor([3.0, 4.0]).double(),)) == [20.0]


def test_ways_are_as_far_off_as_what_they_round() -> None:
    small = tool.Inputs("small", 64, "causal", size=0.001, head_dim=32)
    wanted = tool.exact(small)
    found = {name: tool.errors(way(small), wanted) for name, way in tool.ways().items()}
    sums = {name: sum(x) for name, x in found.items()}
    ordered = [
        *("bfloat16", "current scaling, powers of two", "backward in 8 bits, HYBRID"),
        "scales 1, a first step without warm-up",
    ]
    assert [*sums][:2] == ordered[:2] and sums[ordered[0]] < 2
    assert all(sums[a] < sums[b] for a, b in zip(ordered, ordered[1:], strict=False))
    lines = tool.table((small,)).splitlines()
    assert len(lines) == 2 + len(found) and all(line.count("|") == 3 for line in lines)
