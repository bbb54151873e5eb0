"""The guide's tables of kernels by products of warps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attngen.errors import MeasureError
from tests.support.paths import ROOT
from tools import mma_sync_decode, mma_sync_narrow, mma_sync_speed, mma_sync_table


def test_each_row_stands_in_the_table_of_its_direction() -> None:
    path = ROOT / "docs/results/mma-sync.json"
    report, lines = json.loads(path.read_text()), list(mma_sync_table.markdown(path))
    for row in report["rows"]:
        found = [line for line in lines if line.startswith(f"| {row['case']} |")]
        narrow = row["direction"] == "narrow"
        last = list(row["tflops"].values())[-1] if narrow else f"{row['ratio']:.3f}"
        assert any(line.endswith(f"| {last} |") for line in found)
    assert f"of d64, d128 {report['means']['fwd d64, d128']:.3f}." in "\n".join(lines)


def test_operands_in_8_bits_have_a_table_of_formats(tmp_path: Path) -> None:
    path = tmp_path / "narrow.json"
    row = {"direction": "narrow", "case": "one", "tflops": {"bf16": 1.5, "e4m3": 2.5}, "ratio": 1}
    machine = {"chip": "a chip", "torch": "1", "driver": "2"}
    found = {"rows": [row], "means": {"narrow": 1}, "machine": machine, "date": "", "rounds": 5}
    path.write_text(json.dumps(found))
    assert "| one | 1.5 | 2.5 |" in mma_sync_table.markdown(path)
    rows = [{"arch": "sm_80", "problem": "full", "seconds": x} for x in (0.5, 0.9)]
    path.write_text(json.dumps({**found, "rows": rows, "machine": {**machine, "nvrtc": "13"}}))
    (line,) = mma_sync_table.markdown(path)
    assert "0.5 to 0.9 on `sm_80`" in line
    path.write_text("{}")
    with pytest.raises(MeasureError, match="no report of tools/mma_sync_speed.py"):
        list(mma_sync_table.markdown(path))


def test_what_is_timed_is_built_before() -> None:
    ways = ("fwd", "bwd", "decode", "latent", "narrow")
    found = list(mma_sync_speed.specs((64,), ways))
    assert len(set(found)) == len(found)
    decodes = {(spec.head_dim, spec.head_dim_v) for spec, _ in mma_sync_decode.specs()}
    assert (576, 512) in decodes and {arch for _, arch in mma_sync_decode.specs()} == {
        "sm_90",
        "sm_90a",
    }
    assert {spec.scaling for spec, _ in mma_sync_narrow.specs()} == {"tensor", "token"}
    latent = mma_sync_decode.LATENT[0]
    assert latent.bytes == 2 * latent.batch * latent.length * 576 and "d576/512" in latent.name
    (narrow,) = (each for each in mma_sync_decode.LATENT if each.name == f"{latent.name}-e4m3")
    assert 2 * narrow.bytes == latent.bytes
