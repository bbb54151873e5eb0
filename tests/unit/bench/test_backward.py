"""`attngen bench bwd` without a GPU: work, checks, deterministic modes beside ordinary ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attngen.bench import checking, peers, report, run
from attngen.bench.peers import Operands, Peer
from attngen.bench.report import Mean, make_row, means_of
from attngen.bench.run import Manner
from attngen.bench.workloads import CASES, backward_flops, forward_flops
from attngen.errors import MeasureError
from tests.unit.bench.test_bench import ROOT, SMALL, make_report

TIMES = (
    {"attngen": 2.0, "attngen-det": 2.5, "fa3": 4.0, "fa3-det": 1.0},
    {"attngen": 2.0, "attngen-det": 2.0, "fa3": 1.0},
    {"attngen": 1.0},
)
ROWS = tuple(make_row(name, 10**12, ms, 800, {}) for name, ms in zip("abc", TIMES, strict=True))


@pytest.fixture
def operands() -> Operands:
    torch.manual_seed(0)
    heads = (SMALL.heads_q, SMALL.heads_kv, SMALL.heads_kv, SMALL.heads_q)
    dims = (SMALL.head_dim, SMALL.head_dim, SMALL.head_dim_v, SMALL.head_dim_v)
    shapes = zip(heads, dims, strict=True)
    return Operands(*(torch.randn(2, SMALL.length, h, d).bfloat16() for h, d in shapes))


def test_backward_flops_are_those_of_five_products() -> None:
    by_name = {case.name: case for case in CASES}
    equal = by_name["b4-s4k-h16-d128-causal"]
    assert backward_flops(equal) * 2 == forward_flops(equal) * 5
    assert backward_flops(replace(equal, causal=False)) == 2 * backward_flops(equal)
    apart = by_name["b2-s8k-h16-d192/128-full"]
    assert backward_flops(apart) == 2 * 2 * 16 * 8192**2 * (3 * 192 + 2 * 128)


@pytest.mark.parametrize("causal", [False, True])
def test_check_gradients_right_ones_pass_and_wrong_ones_do_not(causal, operands) -> None:
    case = replace(SMALL, causal=causal)
    expected = checking.expect_backward(case, operands)
    assert {each.result for each in expected} == {0, 1, 2} and len(expected) == 6
    found, absent = peers.load(["sdpa"])
    assert not absent
    right = found["sdpa"].makers["bwd"](case, operands)()
    assert [x.shape for x in right] == [x.shape for x in operands[:3]]
    checking.check(right, expected)
    other = found["sdpa"].makers["bwd"](replace(case, causal=not causal), operands)()
    last = torch.tensor([1, 0]).view(2, 1, 1, 1)
    for number in range(3):
        for wrong in (
            other[number], right[number] * 1.1, right[number] * float("nan"), right[number] * last,
            right[number][..., :8],
        ):  # fmt: skip
            with pytest.raises(MeasureError, match="wrong"):
                checking.check((*right[:number], wrong, *right[number + 1 :]), expected)


def test_differentiated_peer_runs_its_forward_once_and_needs_no_grad_mode(operands) -> None:
    calls = []

    def forward(case, given):
        def call():
            calls.append(given.q.requires_grad and given.v.requires_grad)
            return (given.q.mean() * given.k.mean() * given.v.mean() + given.d_o * 0,)

        return call

    with torch.no_grad():
        backward = peers.differentiated(forward)(SMALL, operands)
        first, second = backward(), backward()
    assert calls == [True] and len(first) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(each.requires_grad for each in operands)


def test_participants_deterministic_modes_stand_beside_their_own() -> None:
    def maker(case, given):
        raise NotImplementedError

    both = Peer("a", {"fwd": maker, "bwd": maker}, maker)
    one = Peer("b", {"fwd": maker, "bwd": maker})
    names = run.participants("bwd", {"fa3": both, "cudnn": one}, Manner(1, 1, deterministic=True))
    assert list(names) == ["attngen", "attngen-det", "fa3", "fa3-det", "cudnn"]
    names = run.participants("bwd", {"fa3": both, "cudnn": one}, Manner(1, 1))
    assert list(names) == ["attngen", "fa3", "cudnn"]


def test_rows_deterministic_modes_are_no_rivals_of_the_ordinary_one() -> None:
    assert [row.ratio for row in ROWS] == [2.0, 0.5, None]
    assert [row.best_peer for row in ROWS] == ["fa3", "fa3", None]
    assert [row.deterministic for row in ROWS] == [0.8, 1.0, None]
    assert means_of(ROWS) == {
        "attngen-det": Mean(1.118, 2),
        "fa3": Mean(1.0, 2),
        "fa3-det": Mean(0.5, 1),
        "best": Mean(1.0, 2),
    }
    assert "best" not in means_of([make_row("a", 1, {"attngen": 1.0, "attngen-det": 2.0}, 1, {})])


def test_text_and_markdown_show_deterministic_modes() -> None:
    made = replace(make_report(*ROWS), direction="bwd")
    names = report.timed(made)
    assert names == ["attngen", "attngen-det", "fa3", "fa3-det"]
    header, *lines = [report.text_header(names), *(report.text_row(row, names) for row in ROWS)]
    assert {len(line.splitlines()[0]) for line in lines} == {len(header)}
    table = list(report.markdown(made))
    assert table[0].endswith("| of ceiling | to best peer | det. to ordinary |")
    assert table[2] == "| `a` | **500** | 400 | 250 | 1000 | 62% | 2.00 | 0.80 |"
    assert table[5].endswith("| 1.118 | 1.000 | 0.500 |  | 1.000 | 0.894 |")
    assert {line.count("|") for line in table[:6]} == {9}


def test_plot_deterministic_bars_share_the_colour_and_are_lighter() -> None:
    pytest.importorskip("matplotlib")
    from attngen.bench import plot

    (axes,) = plot.draw(make_report(*ROWS)).axes
    bars = {each.get_label(): each[0] for each in axes.containers}
    assert bars["attngen"].get_facecolor()[:3] == bars["attngen det."].get_facecolor()[:3]
    assert bars["attngen det."].get_alpha() < bars["attngen"].get_alpha()


@pytest.mark.parametrize("file, direction", [("forward.json", "fwd"), ("backward.json", "bwd")])
def test_results_are_reports_of_known_cases(file: str, direction: str) -> None:
    found = report.read(ROOT / "docs" / "results" / file)
    assert found.direction == direction and found.means["best"].rows == len(found.rows)
    assert {row.case for row in found.rows} == {case.name for case in CASES}
