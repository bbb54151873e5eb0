"""Tuned plans: which one a file makes preferred, who says so, and what is told of a bad file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attngen.bench import tune as tuner
from attngen.bench.tune import Tuning, agree, shape_of
from attngen.call.table import SCALES
from attngen.cli.main import main
from attngen.compiler import digest
from attngen.errors import MeasureError, PlanError
from attngen.kernels import tuned
from attngen.kernels.mma_sync.forward.plan import Plan as MmaPlan
from attngen.kernels.plan import candidates, feasible, plan, plans
from attngen.kernels.tuned import CHIP_VARIABLE, Candidate, Entry
from attngen.kernels.wgmma.forward.plan import Plan
from attngen.runtime.parameters import values_of
from attngen.runtime.run_time import Extent
from attngen.spec.problem import Problem
from tests.support.paths import ROOT

LLAMA = ROOT / "examples" / "specs" / "llama3-8b.toml"
ARCH = "sm_90a"


@pytest.fixture
def problem(make_problem: Callable[..., Problem]) -> Problem:
    """The problem of examples/specs/llama3-8b.toml."""
    return make_problem(128, masks=("causal",))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    monkeypatch.delenv(CHIP_VARIABLE, raising=False)
    return tmp_path / "tuned"


def entry(problem: Problem, times: list[tuple[Plan, float, float]]) -> Entry:
    """Plans with their milliseconds at 512 and 4096 tokens."""
    timed = tuple(
        Candidate(tuned.settings(each), {"512": short, "4096": long}) for each, short, long in times
    )
    return Entry(problem, ARCH, (512, 4096), 0, "2026-01-02", "580", {"headers": "a"}, timed)


def write(folder: Path, *entries: Entry, chip: str = "NVIDIA H200") -> Path:
    path = folder / f"{tuned.slug(chip)}.json"
    tuned.write(path, chip, entries)
    return path


def test_fastest_is_taken_for_other_chips_too(problem: Problem, folder: Path) -> None:
    first, second, *_ = (each for each in feasible(problem, "sm_80") if isinstance(each, MmaPlan))
    timed = tuple(
        Candidate(tuned.settings(each), {"512": ms}) for each, ms in ((first, 2.0), (second, 1.0))
    )
    made = Entry(problem, "sm_80", (512,), 0, "2026-01-02", "580", {"headers": "a"}, timed)
    assert plans(problem, "sm_80") == (first,)
    write(folder, made, chip="NVIDIA A100")
    assert plans(problem, "sm_80") == (second,)


def test_candidates_without_a_file_are_in_the_order_of_the_heuristics(problem: Problem) -> None:
    assert candidates(problem, ARCH) == feasible(problem, ARCH)


def test_candidates_fastest_measured_plan_comes_first(problem: Problem, folder: Path) -> None:
    first, second, third, *rest = feasible(problem, ARCH)
    write(folder, entry(problem, [(first, 1.0, 8.0), (second, 1.1, 8.1), (third, 0.9, 8.0)]))
    assert candidates(problem, ARCH) == (third, first, second, *rest)
    assert plan(problem, ARCH) == third
    assert (
        plan(replace(problem, dtype_o="fp32"), ARCH)
        == feasible(replace(problem, dtype_o="fp32"), ARCH)[0]
    )


def test_ranked_cost_is_the_geometric_mean_over_the_lengths(problem: Problem) -> None:
    a, b, *_ = feasible(problem, ARCH)
    found = entry(problem, [(a, 4.0, 1.0), (b, 1.0, 2.0)]).ranked()
    assert [cost for cost, _ in found] == pytest.approx([2**0.5, 2.0])
    assert found[0][1].settings == tuned.settings(b)


def test_candidates_settings_that_are_no_longer_there_change_nothing(
    problem: Problem, folder: Path
) -> None:
    first, second, *_ = feasible(problem, ARCH)
    gone = replace(first, tile=replace(first.tile, n=8))
    write(folder, entry(problem, [(gone, 0.1, 0.1)]))
    assert candidates(problem, ARCH) == feasible(problem, ARCH)
    write(folder, entry(problem, [(gone, 0.1, 0.1), (first, 2.0, 2.0), (second, 1.0, 1.0)]))
    assert plan(problem, ARCH) == second


def test_settings_tell_every_candidate_from_the_others(make_problem) -> None:
    for head_dim in (64, 128, 192, 256):
        plans = feasible(make_problem(head_dim), ARCH)
        assert len({str(tuned.settings(each)) for each in plans}) == len(plans)


def test_chip_of_the_environment_is_another_file(
    problem: Problem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third, *_ = feasible(problem, ARCH)
    write(folder, entry(problem, [(second, 1.0, 1.0)]))
    write(folder, entry(problem, [(third, 1.0, 1.0)]), chip="NVIDIA H100 80GB HBM3")
    assert plan(problem, ARCH) == second
    monkeypatch.setenv(CHIP_VARIABLE, "nvidia-h100-80gb-hbm3")
    assert plan(problem, ARCH) == third
    monkeypatch.setenv(CHIP_VARIABLE, "nvidia-h800")
    with pytest.raises(PlanError, match="nvidia-h800.*nvidia-h100-80gb-hbm3, nvidia-h200"):
        plan(problem, ARCH)


def test_write_replaces_the_entries_of_the_same_problems(problem: Problem, folder: Path) -> None:
    first, second, *_ = feasible(problem, ARCH)
    other = replace(problem, masks=())
    path = write(folder, entry(problem, [(first, 1.0, 1.0)]), entry(other, [(first, 1.0, 1.0)]))
    write(folder, entry(problem, [(second, 1.0, 1.0)]))
    found = tuned.read(path)
    assert found.chip == "NVIDIA H200"
    assert {each.problem: each.candidates[0].settings for each in found.entries} == {
        problem: tuned.settings(second),
        other: tuned.settings(first),
    }


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', '{"schema":0,"chip":"","entries":[]}'])
def test_plan_damaged_file_is_refused_by_name(problem: Problem, folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "nvidia-h200.json").write_text(text)
    tuned.read.cache_clear()
    with pytest.raises(PlanError, match="nvidia-h200.json"):
        plan(problem, ARCH)


def test_cache_key_follows_the_tuned_plan(problem: Problem, folder: Path) -> None:
    before = digest.cache_key(problem, plan(problem, ARCH), ARCH).digest
    write(folder, entry(problem, [(feasible(problem, ARCH)[1], 1.0, 1.0)]))
    assert digest.cache_key(problem, plan(problem, ARCH), ARCH).digest != before


def test_explain_says_who_chose_the_plan(problem: Problem, folder: Path) -> None:
    def line() -> str:
        text = CliRunner().invoke(main, ["explain", str(LLAMA), "--no-compile"]).stdout
        found, *_ = (each for each in text.splitlines() if each.startswith("plan "))
        return found

    first, second, *_ = plans = feasible(problem, ARCH)
    assert f"the heuristics' choice of {len(plans)} that fit" in line()
    write(folder, entry(problem, [(first, 2.0, 2.0), (second, 1.0, 1.0)]))
    assert "tuned: the fastest of 2 timed on 2026-01-02" in line()
    gone = replace(first, tile=replace(first.tile, n=8))
    write(folder, entry(problem, [(gone, 1.0, 1.0)]))
    assert "what was tuned is not among them" in line()


def test_shipped_files_speak_of_plans_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Path(tuned.__file__).resolve().parent / "tuned"
    for path in shipped.glob("*.json"):
        found = tuned.read(path)
        assert path.stem == tuned.slug(found.chip)
        for each in found.entries:
            plans = feasible(each.problem, each.arch)
            fastest = each.ranked()[0][1]
            assert fastest.settings in [tuned.settings(one) for one in plans], each.problem.label


def test_slug_is_a_plain_file_name() -> None:
    assert tuned.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert tuned.slug("NVIDIA GH200 480GB / 96GB ") == "nvidia-gh200-480gb-96gb"


def test_agree_rounding_passes_and_wrong_rows_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(2, 5, 3, 64, generator=generator).bfloat16()
    assert agree(wanted * (1 + 2**-8), wanted)
    for change in (float("nan"), 0.3):
        wrong = wanted.clone()
        wrong[1, 4, 2, 63] += change
        assert not agree(wrong, wanted)
    assert not agree(torch.full_like(wanted, float("nan")), wanted)


def test_shape_of_keeps_the_work_about_the_same(make_problem) -> None:
    assert shape_of(make_problem(128), 512) == (32, 16)
    assert shape_of(make_problem(64), 16384) == (1, 32)
    assert shape_of(make_problem(256), 40000) == (1, 8)


def test_text_shows_the_fastest_and_the_heuristics_choice(problem: Problem) -> None:
    first, *others = feasible(problem, ARCH)
    second, third, *_ = (plan for plan in others if plan.tile != first.tile)
    timed = [(first, 4.0, 4.0), (second, 1.0, 2.0), (third, 2.0, 2.0)]
    lines = list(Tuning(entry(problem, timed), ("64 x 8: spills",)).text(shown=1))
    assert lines[0] == "causal_d128_bf16: 3 plans timed, 1 refused"
    assert len(lines) == 4 and "1.000   1.0000   2.0000" in lines[2]
    assert lines[3].endswith("(heuristics)")
    assert f"n={first.tile.n}" in lines[3] and "consumers" not in lines[3]


@pytest.mark.parametrize(
    "options, code, message",
    [
        ([], 1, "needs a GPU"),
        (["--lengths", "512,-3"], 2, "--lengths"),
        (["--lengths", "512,,1"], 2, "--lengths"),
        (["--limit", "0"], 2, "--limit"),
    ],
)
def test_tune_refuses_wrong_options_and_machines_without_a_gpu(
    options: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["tune", str(LLAMA), *options])
    assert result.exit_code == code and message in result.output
    assert not folder.exists()


def test_tune_refuses_spec_files_before_it_looks_for_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text("[[kernel]]\nhead_dm = 64\n")
    result = CliRunner().invoke(main, ["tune", str(tmp_path / "odd.toml"), str(tmp_path / "none")])
    assert result.exit_code == 1 and "head_dm" in result.output
    assert "No such file" in result.output and "GPU" not in result.output


@pytest.mark.parametrize(
    "fields",
    [
        {"masks": ("causal", "window")},
        {"out": "fp32"},
        {"dtype": "e4m3", "out": "bf16"},
        {"dtype": "e4m3", "out": "e5m2"},
    ],
    ids=str,
)
def test_tune_has_a_value_for_each_parameter_of_what_it_times(fields, make_problem, render) -> None:
    problem = make_problem(64, **fields)
    assert tuner.serves(problem)
    kernel = render(problem).kernel
    extents = {name: Extent(2, 8, 4, 64, 2048, 256, 64) for name in "qkvo"}
    values = values_of(kernel, extents, tuner.scalars_of(problem, 100))
    numbers = ("i32", "i64", "f32")
    assert {field.name for field in kernel.fields if field.type in numbers} <= {*values}
    given = {*SCALES, "amax_s", "amax_o", "tile_counter", "q", "k", "v", "o", "lse"}
    assert {field.name for field in kernel.fields if field.type == "ptr"} <= given


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "bwd"},
        {"scores": ("softcap",)},
        {"softmax": "learnable"},
        {"q_seq": "packed", "kv_seq": "packed"},
        {"decode": True},
        {"max_logit": True},
        {"dropout": True},
        {"attn_mask": True},
    ],
    ids=str,
)
def test_tune_what_needs_more_operands_is_refused(change, problem: Problem) -> None:
    with pytest.raises(MeasureError, match="plain dense forwards"):
        tuner.tune(replace(problem, **change), ARCH, tuner.Effort((512,), 64, None, 1, 1.0))
