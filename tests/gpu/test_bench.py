"""`attngen bench` on a GPU: rows come with figures, and a wrong result with none."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen import AttentionSpec
from attngen.bench import decode_report, report, run
from attngen.bench.peers import Call, Operands
from attngen.bench.workloads import CASES, Case
from attngen.cli.main import main

pytestmark = [pytest.mark.gpu, pytest.mark.device]

BOTH = ("fwd", "bwd")
KERNELS = [
    AttentionSpec(head_dim=128, mask="causal", directions=BOTH),
    AttentionSpec(head_dim=128, mask="causal", directions=("bwd",), deterministic=True),
    AttentionSpec(head_dim=64, directions=BOTH),
]
# attngen's part of the ceiling, where tests beside may slow either down.
MOST_SHARE = 4
TINY = Case(2, 130, 4, 2, 64, 64, causal=False)


def test_bench_fwd_one_case_is_timed_and_written(tmp_path: Path) -> None:
    output = tmp_path / "new" / "fwd.json"
    options = ["--peers", "sdpa,cudnn", "--rounds", "2", "--budget-ms", "1", "--json", str(output)]
    result = CliRunner().invoke(main, ["bench", "fwd", "--cases", CASES[1].name, *options])
    assert result.exit_code == 0, result.output
    found = report.read(output)
    (row,) = found.rows
    assert row.case == CASES[1].name and row.case in result.stdout
    assert set(row.ms) == {"attngen", "sdpa", "cudnn"} and not row.missing
    assert min(row.ms.values()) > 0 and 0 < row.share < MOST_SHARE
    assert set(found.means) == {"sdpa", "cudnn", "best"}


@pytest.mark.parametrize("direction", BOTH)
def test_checked_calls_wrong_and_failing_peers_have_no_call(direction: str) -> None:
    def wrong(case: Case, operands: Operands) -> Call:
        return lambda: (operands.q * 2, operands.k, operands.v)

    def failing(case: Case, operands: Operands) -> Call:
        raise NotImplementedError("no such head dim\nlong story")

    makers = {"attngen": run.ours().makers[direction], "a": wrong, "b": failing}
    calls, missing = run.checked_calls(direction, TINY, makers)
    assert set(calls) == {"attngen"}
    assert missing["a"].startswith("wrong result: off by")
    assert missing["b"] == "NotImplementedError: no such head dim"


@pytest.mark.parametrize("direction", BOTH)
def test_bench_through_the_call_measures_time_and_joules(direction: str, tmp_path: Path) -> None:
    output = tmp_path / "call.json"
    options = ["--peers", "sdpa", "--rounds", "2", "--through", "call", "--energy"]
    options += ["--json", str(output), "--cases", CASES[1].name]
    result = CliRunner().invoke(main, ["bench", direction, *options])
    assert result.exit_code == 0, result.output
    found = report.read(output)
    (row,) = found.rows
    assert found.through == "call" and set(row.joules) == set(row.ms) == {"attngen", "sdpa"}
    watts = [row.joules[name] / row.ms[name] * 1000 for name in row.ms]
    assert all(50 < each < 1500 for each in watts)


def test_bench_bwd_deterministic_modes_stand_beside_ordinary_ones(tmp_path: Path) -> None:
    output = tmp_path / "bwd.json"
    options = ["--peers", "sdpa,cudnn,fa3", "--rounds", "2", "--budget-ms", "1", "--deterministic"]
    options += ["--json", str(output), "--cases", CASES[1].name]
    result = CliRunner().invoke(main, ["bench", "bwd", *options])
    assert result.exit_code == 0, result.output
    found = report.read(output)
    (row,) = found.rows
    assert not row.missing and {"attngen", "attngen-det", "sdpa", "cudnn"} <= set(row.ms)
    assert ("fa3" in found.absent) == ("fa3-det" not in row.ms)
    assert 0 < row.share < MOST_SHARE and row.deterministic > 0.5


def test_bench_decode_one_case_is_timed_and_written(tmp_path: Path) -> None:
    output = tmp_path / "decode.json"
    options = ["--peers", "cudnn", "--rounds", "2", "--budget-ms", "1", "--json", str(output)]
    result = CliRunner().invoke(main, ["bench", "decode", "--cases", "b16-*-p64", *options])
    assert result.exit_code == 0, result.output
    (row,) = decode_report.read(output).rows
    assert set(row.us) == set(row.host_us) == {"attngen", "cudnn"} and not row.missing
    assert 0 < row.share < MOST_SHARE and min(row.host_us.values()) > 0
