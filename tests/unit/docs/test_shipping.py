"""Figures in the guide to shipping and in README are those of the report, and meet the targets."""

from __future__ import annotations

import json

from tests.support.cache_kit import ROOT
from tools import shipping, sweep

REPORT = json.loads((ROOT / "docs" / "results" / "shipping.json").read_text())
GUIDE = (ROOT / "docs" / "guide" / "shipping.md").read_text()


def test_guide_and_readme_say_what_was_measured() -> None:
    build, (fifty, many), start = REPORT["build"], REPORT["bundles"], REPORT["start_ms"]
    seconds = build["compile_seconds"]
    rows = [
        f"| {build['kernels']} kernels, nothing cached, {build['cores']} cores "
        f"| {build['seconds']:.0f} s, {build['peak_mb']} MB of memory |",
        f"| {seconds['least']:.2f} to {seconds['most']:.1f} s |",
        *(
            f"| bundle of {each['kernels']} kernels "
            f"| {each['bytes'] / 1e6:.1f} MB, {each['bytes_a_kernel'] / 1e3:.0f} kB each |"
            for each in (fifty, many)
        ),
        f"| largest cubin, and in the bundle | {many['cubin_bytes']['most'] / 1e3:.0f} kB, "
        f"{many['stored_bytes']['most'] / 1e3:.0f} kB |",
        f"| {fifty['kernels']} kernels: opened and verified "
        f"| {start['opened and verified']:.1f} ms |",
        f"| … and the first call launched | {start['launched']:.1f} ms |",
    ]
    assert [row for row in rows if row not in GUIDE] == []
    assert f"comes {start['launched']:.0f} ms after" in (ROOT / "README.md").read_text()


def test_report_meets_the_targets() -> None:
    fifty, many = REPORT["bundles"]
    assert fifty["kernels"] == 50 and many["kernels"] == REPORT["build"]["kernels"] >= 500
    assert max(each["bytes_a_kernel"] for each in (fifty, many)) <= 100_000
    assert max(each["stored_bytes"]["most"] for each in (fifty, many)) <= sweep.MOST_BYTES
    assert REPORT["start_ms"]["launched"] <= 60 and REPORT["runs"] >= 3


def test_specs_of_the_tool_make_as_many_kernels_as_it_says() -> None:
    from attngen.compiler import batch
    from attngen.io.toml_text import tomllib
    from attngen.spec.attention_spec import parse_specs

    many, fifty = (shipping.MANY, shipping.MANY_DIMS), (shipping.FIFTY, shipping.FIFTY_DIMS)
    for (text, dims), count in ((many, 512), (fifty, 50)):
        data = tomllib.loads(text.format(head_dims=[*dims]))
        jobs, refused = batch.jobs_of(parse_specs(data, "tool"), None)
        assert (len(jobs), refused) == (count, [])
