"""The page on FP8 training: its code runs, and says of results what they are."""

from __future__ import annotations

import json
import re

import torch

from attngen import fp8
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "guide" / "fp8-training.md"


def test_code_of_the_page_runs_as_it_stands() -> None:
    make = torch.Generator().manual_seed(0)
    space = {
        name: torch.randn(1, 12, 2, 16, generator=make).bfloat16().requires_grad_()
        for name in "qkv"
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = []
    for code in blocks:
        exec(code, space)
        found.append(space["out"].detach())
        if "backward" in code:
            gradients = [space[name].grad for name in "qkv"]
            assert all(x is not None and x.any() for x in gradients)
            for name in "qkv":
                space[name].grad = None
    assert len(blocks) == 5
    current, in_8_bits, delayed, recomputed, stored = found
    assert torch.equal(current, in_8_bits), "the backward alone differs"
    assert not torch.equal(current, delayed) and not torch.equal(delayed, recomputed)
    assert stored.shape == current.shape and not torch.equal(stored, current), "it has no mask"


def test_names_of_the_page_are_those_of_the_module() -> None:
    named = {*re.findall(r"fp8\.([A-Za-z_0-9]+)", PAGE.read_text())} - {"md"}
    assert named <= {*fp8.__all__} and len(named) > 4


def test_losses_of_the_page_are_those_of_the_report() -> None:
    report = json.loads((ROOT / "docs/results/fp8-training.json").read_text())
    text = " ".join(PAGE.read_text().split())
    for seeds in report["losses"].values():
        means = [f"{sum(losses[-20:]) / 20:.4f}" for losses in seeds]
        first, second, third = means
        assert f"{first}, {second} and {third}" in text
