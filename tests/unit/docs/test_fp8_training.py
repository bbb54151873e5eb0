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
    assert len(blocks) == 6
    current, in_8_bits, by_token, delayed, recomputed, stored = found
    assert torch.equal(current, in_8_bits), "the backward alone differs"
    assert not torch.equal(current, by_token)
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
        below = [next(step for step, loss in enumerate(x) if loss < 0.5) for x in seeds]
        assert all(abs(a - b) <= 1 for a, b in zip(below, (97, 96, 93), strict=True))


COLUMNS = [
    ("attngen", "bf16", "to_originals"),
    ("attngen", "bf16", "to_stored"),
    ("emulation", "bf16", "to_stored"),
    ("attngen", "e5m2", "to_stored"),
    ("emulation", "e5m2", "to_stored"),
    ("cudnn", "e5m2", "to_stored"),
]


def test_errors_of_the_page_are_those_of_the_report() -> None:
    report = json.loads((ROOT / "docs/results/fp8-gradient-accuracy.json").read_text())
    found: dict[tuple[str, ...], list[str]] = {}
    for row in report["rows"]:
        case = (str(row["head_dim"]), row["inputs"], row["mask"])
        cells = found.setdefault(case, ["none"] * len(COLUMNS))
        for place, (who, gradients, against) in enumerate(COLUMNS):
            if (row["who"], row["gradients"]) == (who, gradients) and "missing" not in row:
                figures = (f"{x:.1f}" for x in row[against].values())
                cells[place] = " / ".join(figures)
    assert len(found) == 10
    for (dim, *_), cells in found.items():
        assert re.search(
            rf"^\| {dim}, .*\| {re.escape(' | '.join(cells))} \|$", PAGE.read_text(), re.M
        )
    by_case = {key: [cell.split(" / ") for cell in cells] for key, cells in found.items()}
    for cells in by_case.values():
        _, stored, emulated, *_ = cells
        assert all(float(a) <= 1.1 * float(b) for a, b in zip(stored, emulated, strict=True))
