"""Benchmarks without a GPU: cases, arithmetic, tables, peers that are absent, and the command."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attngen.bench import checking, in_jax, peers, report, run, timing, workloads
from attngen.bench.peers import FA3_VARIABLE, Operands
from attngen.bench.report import Machine, Mean, Report, make_row, means_of
from attngen.bench.workloads import CASES, Case, forward_flops, select
from attngen.cli.main import main
from attngen.errors import MeasureError
from tests.support.paths import ROOT

SMALL = Case(2, 37, 4, 2, 16, 24, causal=True)
MACHINE = Machine("NVIDIA H200", "580", "2.11", "13.0", None, "3.12", {"templates": "a"})


def make_report(*rows: report.Row) -> Report:
    return Report(
        schema=report.SCHEMA,
        date="2026-01-02",
        direction="fwd",
        dtype="bf16",
        machine=MACHINE,
        rounds=5,
        budget_ms=20.0,
        ceiling=timing.CEILING,
        peers={"cudnn": "cuDNN 9", "fa3": "xformers 1"},
        absent={"fa4": "not installed"},
        rows=rows,
        means=means_of(rows),
    )


ROWS = (
    make_row("a", 10**12, {"attngen": 2.0, "cudnn": 4.0, "fa3": 1.0}, 800.0, {}),
    make_row("b", 10**12, {"attngen": 2.0, "cudnn": 1.0}, 1000.0, {"fa3": "no d13"}),
)


def test_cases_are_the_table_with_distinct_names() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) == 20
    assert names[:2] == ["b32-s512-h16-d128-full", "b32-s512-h16-d128-causal"]
    assert names[-4:] == [
        *("b2-s8k-h64/8-d128-full", "b2-s8k-h64/8-d128-causal"),
        *("b2-s8k-h16-d192/128-full", "b2-s8k-h16-d192/128-causal"),
    ]


def test_forward_flops_are_those_of_two_products() -> None:
    by_name = {case.name: forward_flops(case) for case in CASES}
    assert by_name["b4-s4k-h16-d128-full"] == 4 * 4 * 16 * 4096**2 * 128
    assert by_name["b4-s4k-h16-d128-causal"] == 2 * 4 * 16 * 4096**2 * 128
    assert by_name["b2-s8k-h16-d192/128-full"] == 2 * 2 * 16 * 8192**2 * (192 + 128)
    assert by_name["b2-s8k-h64/8-d128-full"] == 4 * 2 * 64 * 8192**2 * 128


@pytest.mark.parametrize(
    "patterns, count",
    [((), 20), (("*",), 20), (("*-causal",), 10), (("*d64*", "b4-s4k-h32*"), 4), (("*64/8*",), 2)],
)
def test_select_patterns_keep_the_order_of_the_table(patterns: tuple[str, ...], count: int) -> None:
    found = select(patterns)
    assert len(found) == count
    assert list(found) == [case for case in CASES if case in found]


def test_select_pattern_that_fits_nothing_lists_the_names() -> None:
    with pytest.raises(MeasureError, match="'s4096'.*there are") as caught:
        select(["*causal", "s4096"])
    assert all(case.name in str(caught.value) for case in CASES)


def test_make_row_rates_share_and_ratio() -> None:
    row = ROWS[0]
    assert row.tflops == {"attngen": 500.0, "cudnn": 250.0, "fa3": 1000.0}
    assert (row.share, row.best_peer, row.ratio) == (0.625, "fa3", 0.5)


def test_make_row_without_our_figure_or_a_peer_has_no_ratio() -> None:
    alone = make_row("a", 10**9, {"attngen": 1.0}, 100.0, {"fa3": "no"})
    assert (alone.best_peer, alone.ratio) == (None, None)
    failed = make_row("a", 10**9, {"fa3": 1.0}, 100.0, {"attngen": "wrong"})
    assert (failed.share, failed.best_peer, failed.ratio) == (None, "fa3", None)
    assert means_of([alone, failed]) == {}


def test_means_are_geometric_over_the_rows_that_have_both() -> None:
    assert means_of(ROWS) == {"cudnn": Mean(1.0, 2), "fa3": Mean(0.5, 1), "best": Mean(0.5, 2)}


def test_energy_of_a_row_is_written_and_read_as_work_a_joule(tmp_path: Path) -> None:
    row = make_row("a", 10**12, {"attngen": 2.0}, 800.0, {}, {"attngen": 0.80001, "fa3": 0.5})
    assert row.joules == {"attngen": 0.8, "fa3": 0.5}
    assert report.text_row(row, ["attngen"]).splitlines()[1] == "  TFLOP/J: attngen 1.25, fa3 2"
    report.save(replace(make_report(row), through="call"), tmp_path / "a.json")
    assert report.read(tmp_path / "a.json") == replace(make_report(row), through="call")


@pytest.mark.parametrize("given, expected", [([], (5, 40.0)), (["--rounds", "3"], (3, 40.0))])
def test_bench_through_a_call_has_short_rounds_unless_told(
    monkeypatch, given: list[str], expected: tuple[int, float]
) -> None:
    seen: list[run.Manner] = []

    def timed(direction, cases, peers, absent, manner, progress):
        seen.append(manner)
        return make_report(*ROWS)

    monkeypatch.setattr(run, "require_gpu", lambda: "sm_90a")
    monkeypatch.setattr(run, "run", timed)
    cases = ["--cases", "b32-s512-h16-d128-*"]  # two
    options = ["--through", "call", "--energy", "--peers", "sdpa", *cases, *given]
    assert CliRunner().invoke(main, ["bench", "bwd", *options]).exit_code == 0
    rounds, budget_ms = expected
    assert seen == [run.Manner(rounds, budget_ms, through="call", energy=True)]


def test_run_gives_the_report_so_far_with_each_row(monkeypatch) -> None:
    monkeypatch.setattr(run, "require_gpu", lambda: "sm_90a")
    monkeypatch.setattr(run, "time_case", lambda way, case, *_: ROWS[case.causal])
    told: list[Report] = []
    manner = run.Manner(3, 20.0, through="call")
    given = [replace(SMALL, causal=causal) for causal in (False, True)]
    made = run.run("fwd", given, {}, {"fa4": "not installed"}, manner, told.append)
    assert [each.rows for each in told] == [ROWS[:1], ROWS] and told[-1] == made
    assert told[0].means == means_of(ROWS[:1]) and made.means == means_of(ROWS)
    assert (made.rounds, made.through, made.absent) == (3, "call", {"fa4": "not installed"})


def test_bench_in_jax_has_nothing_to_go_through() -> None:
    options = ["--frontend", "jax", "--through", "call"]
    result = CliRunner().invoke(main, ["bench", "bwd", *options])
    assert result.exit_code == 2
    assert "--through is of PyTorch's calls; in jax leave it out" in result.output


def test_report_comes_back_equal_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    wanted = make_report(*ROWS)
    report.save(wanted, path)
    assert report.read(path) == wanted
    report.save(replace(wanted, schema=0), path)
    with pytest.raises(MeasureError, match="schema 0"):
        report.read(path)
    for text in ("", "[]", '{"rows": []}', path.read_text().replace('"ms"', '"seconds"')):
        path.write_text(text)
        with pytest.raises(MeasureError, match="report.json is no report"):
            report.read(path)


def test_text_names_every_gap() -> None:
    text = "\n".join(
        [
            *(report.text_row(row, ["attngen", "cudnn", "fa3"]) for row in ROWS),
            *report.text_summary(make_report(*ROWS)),
        ]
    )
    assert "fa3: no d13" in text and "absent: fa4: not installed" in text
    assert "0.500 x the best peer of each row, geometric mean of 2 rows" in text


def test_markdown_has_a_row_a_case_with_the_best_in_bold() -> None:
    lines = list(report.markdown(make_report(*ROWS)))
    assert lines[:5] == [
        "| case | attngen | FA3 | cuDNN | of ceiling | to best peer |",
        "|---|---:|---:|---:|---:|---:|",
        "| `a` | 500 | **1000** | 250 | 62% | 0.50 |",
        "| `b` | 500 | – | **1000** | 50% | 0.50 |",
        "| attngen to it, geometric mean |  | 0.500 | 1.000 |  | 0.500 |",
    ]
    assert "NVIDIA H200" in lines[6] and "900 in the median" in lines[6]
    assert "FA4 was absent" in lines[7] and "FA3: xformers 1" in lines[7]


def test_markdown_has_operations_a_joule_where_energy_was_measured() -> None:
    joules = {"attngen": 0.5, "cudnn": 1.0, "fa3": 0.4, "fa3-det": 0.1}
    metered = make_row("c", 10**12, {"attngen": 2.0, "fa3": 1.0}, 800.0, {}, joules=joules)
    lines = list(report.markdown(make_report(metered, ROWS[1])))
    assert lines[0].endswith("| to best peer | TFLOP/J | to the best peer's |")
    assert lines[2].endswith("| 0.50 | 2.00 | 0.80 |")
    assert lines[3].endswith("| 0.50 | – | – |")
    assert all(line.count("|") == lines[0].count("|") for line in lines[1:5])


def test_host_interleaved_waits_for_the_gpu_before_each_measurement(monkeypatch) -> None:
    events: list[str] = []
    clock = iter(float(number) for number in range(100))
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = {name: lambda name=name: events.append(name) for name in "ab"}
    taken = timing.host_interleaved(calls, rounds=3, repeats=4)
    assert taken == {"a": 250000.0, "b": 250000.0}  # a second for four calls
    warm, measured = events[: 2 * timing.HOST_WARM_UP], events[2 * timing.HOST_WARM_UP :]
    assert "wait" not in warm and events.count("a") == events.count("b") == 20 + 3 * 4
    assert measured[::5] == ["wait"] * 7 and measured.count("wait") == 7


def test_time_interleaved_takes_medians_of_shuffled_rounds(monkeypatch) -> None:
    monkeypatch.setattr(timing.random, "shuffle", random.Random(1).shuffle)
    seen: list[tuple[str, int]] = []
    speeds = {"fast": [0.0, 1.0, 9.0, 2.0], "slow": [40.0, 30.0, 31.0, 99.0]}

    def stopwatch(call, repeats: int) -> float:
        seen.append((call(), repeats))
        return speeds[call()].pop(0)

    calls = {name: lambda name=name: name for name in speeds}
    assert timing.time_interleaved(calls, 3, 25.0, stopwatch) == {"fast": 2.0, "slow": 31.0}
    rounds = [tuple(name for name, _ in seen[i : i + 2]) for i in (2, 4, 6)]
    assert all(set(each) == {"fast", "slow"} for each in rounds) and len(set(rounds)) == 2
    assert {repeats for name, repeats in seen[2:] if name == "fast"} == {timing.MAX_REPEATS}
    assert {repeats for name, repeats in seen[2:] if name == "slow"} == {2}


def test_time_interleaved_runs_a_call_for_a_while_before_it_counts() -> None:
    seen: list[tuple[str, int]] = []
    speeds = {"a": [2.0, 9.0, 1.0, 8.0, 3.0], "b": [4.0, 9.0, 7.0, 8.0, 5.0]}

    def stopwatch(call, repeats: int) -> float:
        seen.append((call(), repeats))
        return speeds[call()].pop(0)

    calls = {name: lambda name=name: name for name in speeds}
    measured = timing.time_interleaved(calls, 2, 20.0, stopwatch, settle_ms=100.0)
    assert measured == {"a": 2.0, "b": 6.0}  # 9 and 8 are not counted
    expected = {"a": [50, 10], "b": [25, 5]}
    for (name, settle), (again, counted) in zip(seen[2::2], seen[3::2], strict=True):
        assert name == again and [settle, counted] == expected[name]


def test_check_right_output_passes_and_wrong_ones_do_not() -> None:
    torch.manual_seed(0)
    shapes = (SMALL.heads_q, SMALL.head_dim), (2, SMALL.head_dim), (2, SMALL.head_dim_v)
    tensors = [torch.randn(2, 37, *shape).bfloat16() for shape in shapes]
    operands = Operands(*tensors, tensors[0])
    expected = checking.expect_forward(SMALL, operands)
    assert {each.index for each in expected} >= {(0, 0), (0, 36), (1, 0), (1, 36)}
    q, k, v = (each.transpose(1, 2) for each in operands[:3])
    attend = torch.nn.functional.scaled_dot_product_attention
    right = attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    checking.check((right,), expected)
    wrong = {
        "scaled": right * 1.05,
        "not causal": attend(q, k, v, enable_gqa=True).transpose(1, 2),
        "NaN": torch.full_like(right, float("nan")),
        "last sequence missing": right * torch.tensor([1, 0]).view(2, 1, 1, 1),
        "shape": right[..., :16],
    }
    for out in wrong.values():
        with pytest.raises(MeasureError, match="wrong"):
            checking.check((out,), expected)


def test_load_unknown_peer_is_refused_with_those_there_are() -> None:
    with pytest.raises(MeasureError, match="fa9.*sdpa, cudnn, fa3, fa4, flex"):
        peers.load(["sdpa", "fa9"])


def test_load_absent_peers_are_named_with_the_reason(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FA3_VARIABLE, raising=False)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    found, absent = peers.load(["sdpa", "fa3", "fa4"])
    assert list(found) == ["sdpa"] and found["sdpa"].source == f"torch {torch.__version__}"
    assert FA3_VARIABLE in absent["fa3"] and "flash_attn" in absent["fa4"]
    library = tmp_path / "lib.so"
    library.write_bytes(b"not a library")
    monkeypatch.setenv(FA3_VARIABLE, str(library))
    _, absent = peers.load(["fa3"])
    assert "OSError" in absent["fa3"]


def test_load_fa3_takes_the_package_before_xformers(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FA3_VARIABLE, raising=False)
    (tmp_path / "flash_attn_interface.py").write_text(
        "def flash_attn_func(q, k, v, causal): return q + causal, 'lse'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    found, absent = peers.load(["fa3"])
    sys.modules.pop("flash_attn_interface")
    assert not absent and "flash_attn_interface" in found["fa3"].source
    operands = Operands(*torch.zeros(4, 1, 1, 1, 1))
    (out,) = found["fa3"].makers["fwd"](SMALL, operands)()
    assert out.item() == 1 and set(found["fa3"].makers) == {"fwd", "bwd"}


def test_load_fa3_looks_into_xformers_without_importing_it(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FA3_VARIABLE, raising=False)
    folder = tmp_path / "xformers" / "flash_attn_3"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise SystemExit\n")
    (folder / "_C.so").write_bytes(b"not a library")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    _, absent = peers.load(["fa3"])
    assert "OSError" in absent["fa3"] and "_C.so" in absent["fa3"]


@pytest.mark.parametrize(
    "options, code, message",
    [
        (["--cases", "none-such"], 1, "no case fits 'none-such'"),
        (["--cases", "a,,b"], 2, "--cases"),
        (["--rounds", "0"], 2, "--rounds"),
        (["--peers", ""], 2, "--peers"),
        (["--peers", "fa3,fa9"], 1, "unknown peers: fa9; there are: sdpa"),
    ],
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_bench_wrong_options_are_refused(
    direction: str, options: list[str], code: int, message: str
) -> None:
    result = CliRunner().invoke(main, ["bench", direction, *options])
    assert result.exit_code == code
    assert message in result.output


def test_bench_fwd_without_a_gpu_says_so_and_writes_nothing(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "fwd.json"
    result = CliRunner().invoke(main, ["bench", "fwd", "--json", str(output)])
    assert result.exit_code == 1 and not output.exists()
    assert "needs a GPU" in result.output and "attngen doctor" in result.output


def test_bench_plot_without_matplotlib_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from attngen.cli.main import main; main(['bench', 'fwd', '--plot', 'x.png'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 1
    assert "pip install '.[bench]'" in done.stderr and "Traceback" not in done.stderr


def test_bench_plot_of_no_report_says_of_which_commands_it_is_none(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "odd.json").write_text("{}")
    files = [str(tmp_path / name) for name in ("odd.json", "odd.svg")]
    result = CliRunner().invoke(main, ["bench", "plot", *files])
    assert result.exit_code == 1
    for command in ("attngen bench", "attngen bench decode"):
        assert f"is no report of `{command}`" in result.output


def test_bench_plot_draws_a_bar_a_figure_and_the_ceiling(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from attngen.bench import plot

    (axes,) = plot.draw(make_report(*ROWS)).axes
    labels = {container.get_label(): container for container in axes.containers}
    assert list(labels) == ["attngen", "FA3", "cuDNN"]
    assert [bar.get_height() for bar in labels["cuDNN"]] == [250.0, 1000.0]
    (ceiling,) = axes.lines
    assert list(ceiling.get_ydata()) == [800.0, 1000.0, 1000.0]
    report.save(make_report(*ROWS), tmp_path / "a.json")
    arguments = ["bench", "plot", str(tmp_path / "a.json")]
    assert CliRunner().invoke(main, [*arguments, str(tmp_path / "a.svg")]).exit_code == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    refused = CliRunner().invoke(main, [*arguments, str(tmp_path / "a.xyz")])
    assert refused.exit_code == 1 and "png" in refused.output


def test_workloads_and_report_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import attngen.bench.report, attngen.bench.workloads, attngen.bench.machine as machine\n"
        "assert machine.describe_machine().torch is None"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd="/")


def test_every_peer_has_a_title_and_every_direction_its_work() -> None:
    ordinary = [name for name in report.TITLES if not name.endswith(report.DETERMINISTIC)]
    assert set(ordinary) == {*peers.LOADERS, *in_jax.LOADERS, report.OURS}
    assert set(workloads.FLOPS) == set(checking.EXPECT) == set(peers.ours().makers)
