"""`attngen bench decode` without a GPU: bytes, checks, reports, and what the command refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import attngen
from attngen.bench import decode, decode_report, peers
from attngen.bench.decode_report import CASES, Case, make_row, means_of
from attngen.bench.report import Machine, Mean
from attngen.cli.main import main
from attngen.errors import MeasureError
from tools import render_readme

SMALL = Case(3, 4, 2, 64, 16, 32)
ROWS = (
    make_row(CASES[0], {"attngen": 100, "fa3": 110, "cudnn": 105}, {"attngen": 9.9}, 4000, {}),
    make_row(CASES[1], {"attngen": 100.0, "fa3": 90.0}, {}, 4000, {"cudnn": "too long"}),
    make_row(CASES[2], {"fa3": 90.0}, {}, 4000, {"attngen": "wrong result"}),
)
MACHINE = Machine("H", None, "2", "13", "13", "3", {})
REPORT = decode_report.Report(
    1, "2026-01-01", "bf16", MACHINE, 9, 25.0, {}, {"flashinfer": "not here"}, ROWS, means_of(ROWS)
)


@pytest.fixture
def operands() -> decode.Operands:
    return decode.random_operands(SMALL, torch.device("cpu"))


def on_reference(case: Case, x: decode.Operands) -> decode.Call:
    return lambda: attngen.attention(
        x.q, x.k_pages, x.v_pages, layout="paged_kv_bshd_bshd_bshd", page_table=x.table,
        seqused_kv=x.lengths, backend="reference",
    )  # fmt: skip


def test_cases_have_names_of_their_own_and_count_keys_and_values_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert CASES[0].name == "b64-h64/8-kv8k-p64"
    assert CASES[0].bytes == 2 * 64 * 8 * 8192 * 128 * 2
    assert {case.page for case in CASES} == {16, 64, 256}


def test_row_rates_are_bytes_in_the_time() -> None:
    row = ROWS[0]
    assert row.gbps["attngen"] == round(CASES[0].bytes / 100e-6 / 1e9)
    assert row.best_peer == "cudnn" and row.ratio == 1.05 and row.host_us == {"attngen": 9.9}
    assert row.share == round(CASES[0].bytes / 100e-6 / 4000e9, 3)
    assert ROWS[2].share is None and ROWS[2].ratio is None
    assert means_of(ROWS)["fa3"] == Mean(0.995, 2) and means_of(ROWS)["best"].rows == 2


def test_report_is_read_as_it_was_written(tmp_path) -> None:
    decode_report.save(REPORT, tmp_path / "decode.json")
    assert decode_report.read(tmp_path / "decode.json") == REPORT
    decode_report.save(replace(REPORT, schema=2), tmp_path / "other.json")
    with pytest.raises(MeasureError, match="schema 2"):
        decode_report.read(tmp_path / "other.json")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(MeasureError, match="no report of `attngen bench decode`"):
        decode_report.read(tmp_path / "none.json")


def test_text_names_who_has_no_figure() -> None:
    names = ("attngen", "fa3", "cudnn")
    width = len(decode_report.text_header(names)) - len("  host µs")
    first, second, *_ = decode_report.text_row(ROWS[1], names).splitlines()
    assert len(first.rstrip()) == width and "–" in first and second == "  cudnn: too long"
    assert [*decode_report.text_summary(REPORT)][-1] == "absent: flashinfer: not here"


def test_plot_of_a_decode_report_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    decode_report.save(REPORT, tmp_path / "decode.json")
    files = [str(tmp_path / name) for name in ("decode.json", "decode.svg")]
    result = CliRunner().invoke(main, ["bench", "plot", *files])
    assert result.exit_code == 0, result.output
    drawn = (tmp_path / "decode.svg").read_text()
    assert "</svg>" in drawn


def test_plot_has_a_colour_for_everybody_who_is_timed() -> None:
    pytest.importorskip("matplotlib")
    from attngen.bench import plot, report

    for titles in (report.TITLES, decode_report.TITLES):
        names = {name.removesuffix(report.DETERMINISTIC) for name in titles}
        assert len({plot.COLOURS[name] for name in names}) == len(names)


def test_check_right_outputs_pass_and_wrong_ones_have_no_call(operands) -> None:
    def wrong(case: Case, x: decode.Operands) -> decode.Call:
        other = x.table.flip(0).contiguous()  # of another sequence
        return on_reference(case, replace(x, table=other))

    def failing(case: Case, x: decode.Operands) -> decode.Call:
        raise NotImplementedError("no such page\nlong story")

    makers = {"attngen": on_reference, "a": wrong, "b": failing}
    calls, missing = decode.checked_calls(SMALL, makers, operands)
    assert set(calls) == {"attngen"} and missing["a"].startswith("wrong result: off by")
    assert missing["b"] == "NotImplementedError: no such page"


def test_operands_are_the_same_in_pages_and_dense(operands) -> None:
    pages = operands.k_pages[operands.table.long()].flatten(1, 2)
    assert torch.equal(pages, operands.dense[0]) and operands.lengths.tolist() == [64] * 3
    assert not torch.equal(operands.table.flatten(), torch.arange(12).int())


def test_peers_that_are_not_here_are_named() -> None:
    if importlib.util.find_spec("flashinfer") is None:
        found, absent = decode.load(["flashinfer"])
        assert not found and "flashinfer" in absent["flashinfer"]
    with pytest.raises(MeasureError, match="unknown peers: fa9"):
        decode.load(["fa9"])
    assert set(decode.LOADERS) | {"attngen"} == set(decode_report.TITLES)
    assert issubclass(peers.Absent, Exception)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--cases", "b9-*"], "no case fits"),
        (["--peers", "fa9"], "unknown peers: fa9; there are: fa3"),
        ([], "timing needs a GPU"),
    ],
)
def test_command_refuses_what_it_cannot_do(options, reason, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(main, ["bench", "decode", *options])
    assert result.exit_code == 1 and reason in result.output


def test_report_as_a_table_has_every_figure_and_the_best_of_a_row_in_bold(tmp_path) -> None:
    peers = dict.fromkeys(("attngen", "fa3", "cudnn"), "here")
    report = dataclasses.replace(REPORT, peers=peers)
    decode_report.save(report, tmp_path / "decode.json")
    block = "<!-- table: decode.json -->\n<!-- end of table -->"
    text, count = render_readme.render(block, tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert count == 1 and len({line.count("|") for line in lines}) == 1
    assert lines[0].startswith("| case | attngen | FA3 paged | cuDNN dense | of a copy |")
    for row, line in zip(ROWS, lines[2:], strict=False):
        best = max(row.gbps.values(), default=None)
        for rate in row.gbps.values():
            assert (f"**{rate}**" if rate == best else f" {rate} ") in line
    assert "FlashInfer paged was absent." in text and "cuDNN dense: here" in text
