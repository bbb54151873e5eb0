"""tools/callables_table.py and tools/gallery.py: what they write of a report, and of functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from attngen.errors import MeasureError
from tools import callables_table, gallery
from tools.callable_cases import CASES


def report_of(*rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"chip": "A chip", "torch": "2", "driver": "1"}
    return {"machine": machine, "date": "2026-11-30", "rounds": 3, "case": "b4", "rows": rows}


ROWS = (
    {"case": "tree", "direction": "fwd", "ms": {"attngen": 0.5, "kept": 0.25, "flex": 1.0},
     "to_flex": 2.0},
    {"case": "tree", "direction": "bwd", "ms": {"attngen": 2.0, "flex": 1.0}, "to_flex": 0.5},
    {"case": "window", "direction": "fwd", "ms": {"attngen": 3.0, "built_in": 2.7},
     "to_built_in": 0.9},
    {"case": "tree", "direction": "mask", "length": 64, "ms": {"attngen": 0.1}},
    {"case": "bias", "direction": "host", "us": 20.25},
    {"case": "mask_mod", "direction": "first call", "ms": 316.2},
)  # fmt: skip


def test_table_has_a_line_a_function_and_what_stands_beside(tmp_path: Path) -> None:
    path = tmp_path / "callables.json"
    path.write_text(json.dumps(report_of(*ROWS)))
    _, _, tree, window, _, about, mean, masks, host, first = callables_table.markdown(path)
    assert tree == "| tree | 0.50 / 2 | 0.25 | 1 / 1 | 2 / 0.50 | – | – |"
    assert window == "| window | 3 | – | – | – | 2.7 | 0.90 |"
    assert "A chip" in about and "1.00; the least 0.50" in mean
    assert masks.endswith("64 x 64 pairs, milliseconds: tree 0.1.")
    assert host.endswith("bias 20.2.") and first.endswith("mask_mod 316.")
    path.write_text("{}")
    with pytest.raises(MeasureError, match="callables_speed"):
        list(callables_table.markdown(path))


@pytest.mark.parametrize("name", CASES)
def test_each_function_has_a_picture_of_what_it_does(name) -> None:
    case = gallery.case_of(CASES[name])
    root = ElementTree.fromstring(gallery.picture(case))
    drawn = [x for x in root.iter() if x.tag.endswith(("path", "polyline"))]
    assert drawn
    if case.mask_mod is None:
        return
    (path,) = drawn
    b = h = torch.zeros((), dtype=torch.int32)
    i, j = torch.meshgrid(*[torch.arange(gallery.LENGTH)] * 2, indexing="ij")
    runs = path.attrib["d"].removeprefix("M").split("M")
    count = sum(int(run.partition("h")[2]) for run in runs)
    assert count == int(case.mask_mod(b, h, i, j).sum()) > 0


def test_speeds_say_what_was_measured_and_what_has_no_kernel() -> None:
    speeds = list(gallery.speeds_of([ROWS[0], ROWS[1]]))
    assert speeds == ["Forward 2.00 and backward 0.50 times as fast as FlexAttention."]
    alone, beside = gallery.speeds_of([ROWS[2]])
    assert alone == "Forward 3 ms; FlexAttention has no kernel for it."
    assert beside == "Beside attngen's own argument for the same: 0.90."
    assert not list(gallery.speeds_of([]))
