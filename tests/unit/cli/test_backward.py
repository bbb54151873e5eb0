"""The attngen command on a spec that is trained: a backward is several kernels of one direction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.compiler import batch
from attngen.compiler.builder import build_problem
from attngen.fragments import features
from attngen.spec import resolve
from attngen.spec.attention_spec import load_specs
from tests.unit.cli.test_main import cache_dir, run, write  # noqa: F401  # a cache of each test's own

TRAINED = """
[[kernel]]
name = "trained"
head_dim = 256
directions = ["fwd", "bwd"]
"""
WINDOWED = TRAINED.replace("256", "128") + 'window = true\nmask = "causal"\n'
FAMILIES = ["sm90_fwd", "bwd_prepare", "sm90_bwd_dkv", "sm90_bwd_dq", "sm90_bwd_dq_kept"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "trained.toml", TRAINED)


def test_build_backward_is_several_kernels_that_a_call_then_finds(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.loads(line) for line in run("build", path, "--json").stdout.splitlines()]
    assert sorted(line["entry"].partition("__")[0] for line in lines) == sorted(FAMILIES)
    assert sorted(line["direction"] for line in lines) == ["bwd"] * 4 + ["fwd"]
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    (spec,) = load_specs(path)
    backward = replace(resolve.resolve(spec, features.scan())[0], direction="bwd")
    assert all(built.from_cache for built in build_problem(backward, "sm_90a"))


def test_build_backward_of_fp8_keys_is_refused_with_a_legal_spec(tmp_path: Path) -> None:
    text = TRAINED + 'kv_dtype = "e4m3"\n'
    result = run("build", write(tmp_path / "refused.toml", text))
    assert result.exit_code == 1
    assert "direction 'bwd' has no kernels for 'bf16' queries, 'e4m3' keys" in result.stderr
    assert "directions=('fwd',)" in result.stderr


def test_explain_backward_prints_each_kernel(path: Path) -> None:
    lines = run("explain", path, "--no-compile").stdout.splitlines()
    heads = [line.split() for line in lines if line[:1] not in ("", " ")]
    kernel = ["plan", "roofline", "source"]
    assert [head[0] for head in heads] == ["spec", "problem", *kernel, "problem", *kernel * 4]
    assert [head[2].strip(",") for head in heads if head[0] == "plan"] == FAMILIES
    # Of 48 x 64 pairs, 4 products over 256 columns: 2 * 3072 * 1024 FLOPs, 4096 a cycle.
    assert any("tensor cores: 1536 cycles a block" in line for line in lines)


def test_render_writes_a_file_a_kernel(path: Path, tmp_path: Path) -> None:
    files = run("render", path, "-o", tmp_path / "out").stdout.splitlines()
    assert [Path(file).name.partition("__")[0] for file in files] == FAMILIES


def test_list_has_a_line_a_direction(path: Path) -> None:
    lines = run("list", path).stdout.splitlines()
    assert [line.split()[2] for line in lines] == ["fwd", "bwd"]


def test_windowed_backward_is_two_problems_in_every_list(tmp_path: Path) -> None:
    """Which of them a call launches is decided by its window's size."""
    path = write(tmp_path / "windowed.toml", WINDOWED)
    labels = ["causal_window_d128_bf16", "causal_window_d128_bf16_deterministic"]
    named = [line.split()[2:] for line in run("list", path).stdout.splitlines()]
    assert named == [["fwd", labels[0]], ["bwd", labels[0]], ["bwd", labels[1]]]
    explained = run("explain", path, "--no-compile").stdout.splitlines()
    problems = [line.split()[1:] for line in explained if line.startswith("problem")]
    assert problems == named
    lines = run("build", path, "--dry-run", "--json").stdout.splitlines()
    assert {(each["direction"], each["label"]) for each in map(json.loads, lines)} == {
        tuple(each) for each in named
    }


def test_trace_of_a_windowed_backward_is_built_for_windows_of_any_size(tmp_path: Path) -> None:
    (spec,) = load_specs(write(tmp_path / "windowed.toml", WINDOWED))
    _, plain, ordered = resolve.resolve(spec, features.scan())
    for noted, wanted in ((plain, {plain, ordered}), (ordered, {ordered})):
        jobs, refused = batch.jobs_for([(noted, "sm_90a")], "trace")
        assert {job.problem for job in jobs} == wanted and not refused
