"""`attngen build` and `attngen bundle build`: progress, shards, traces, what failed, exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attngen.cli.main import main
from attngen.compiler import batch
from attngen.compiler.cache import Cache
from attngen.runtime.tracing import Trace
from attngen.ship.bundle import Bundle
from attngen.spec.attention_spec import load_specs
from tests.support.cache_kit import ARCH, PROBLEM, ROOT
from tests.support.cli_kit import CURATED, GEMMA, LLAMA, run

KERNELS = len([*(ROOT / "generated").glob("*.cu")])  # of the curated specs, as they are rendered
REFUSED = '[[kernel]]\nname = "odd"\nhead_dim = 580\nhead_dim_v = 128\n'


@pytest.fixture(autouse=True, scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests here, so that each kernel is compiled once."""
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("cache")
    patch.setenv("ATTNGEN_CACHE_DIR", str(path))
    patch.delenv("ATTNGEN_DISABLE_JIT", raising=False)
    yield path
    patch.undo()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of Gemma's two kernels."""
    path = tmp_path_factory.mktemp("bundles") / "gemma.attn"
    assert run("bundle", "build", GEMMA, "-o", path).exit_code == 0
    return path


def test_build_says_how_far_it_is_and_what_is_in_the_bundle(gemma: Path, tmp_path: Path) -> None:
    result = run("bundle", "build", GEMMA, "-o", tmp_path / "again.attn")
    assert result.exit_code == 0
    assert "[2/2] sm90_fwd__causal" in result.stdout and "0 compiled, 2 cached" in result.stdout
    assert "again.attn: 2 variants, 2 kernels" in result.stdout
    assert (tmp_path / "again.attn").read_bytes() == gemma.read_bytes()


def test_build_kernels_are_those_of_the_cache(gemma: Path, cache_dir: Path) -> None:
    bundle = Bundle(gemma)
    jobs, _ = batch.jobs_of(load_specs(GEMMA), None)
    for job in jobs:
        entry = batch.find_cached(job, Cache(cache_dir))
        program = bundle.program(job.problem, job.arch)
        assert entry is not None and program is not None and program.titles == job.titles
        assert [bundle.cubin(binary) for binary in program.binaries] == [entry.cubin]


def test_build_kernel_in_a_bundle_has_at_most_100_kB(gemma: Path) -> None:
    assert gemma.stat().st_size / 2 <= 100_000


def test_build_says_of_a_kernel_what_it_keeps_in_local_memory(monkeypatch) -> None:
    run_jobs = batch.run

    def spilling(*given: Any) -> Iterator[batch.Outcome]:
        for outcome in run_jobs(*given):
            resources = dataclasses.replace(outcome.binary.resources, spill_bytes=8, stack_bytes=16)
            binary = dataclasses.replace(outcome.binary, resources=resources)
            yield dataclasses.replace(outcome, binary=binary)

    assert "spills" not in run("build", GEMMA).stdout
    monkeypatch.setattr(batch, "run", spilling)
    assert run("build", GEMMA).stdout.count("8 bytes of spills, 16 bytes of stack") == 2


def test_build_one_refused_writes_no_bundle_and_lists_it_last(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text(REFUSED)
    result = run("bundle", "build", GEMMA, tmp_path / "odd.toml", "-o", tmp_path / "x")
    assert result.exit_code == 1
    assert "1 failed" in result.stdout and "head_dim 580" in result.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["bundle", "build", "-o", "x"],
        ["bundle", "build", str(GEMMA)],
        ["build"],
        *(["build", str(GEMMA), "--shard", shard] for shard in ("0/2", "3/2", "1", "a/b", "1/0")),
        ["bundle", "merge", "-o", "x"],
        ["bundle", "wheel", "x"],
        ["trace"],
    ],
)
def test_wrong_usage_has_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_build_dry_run_compiles_nothing_and_says_what_it_would(tmp_path: Path) -> None:
    place = tmp_path / "kernels"
    result = run("build", CURATED, "--dry-run", "-o", place)
    assert result.exit_code == 0 and not place.exists()
    assert f"{KERNELS} to compile, 0 cached" in result.stdout
    run("build", LLAMA, "-o", place)
    lines = run("build", LLAMA, GEMMA, "--dry-run", "--json", "-o", place).stdout.splitlines()
    assert [json.loads(line)["cached"] for line in lines] == [True, True, False, False]
    assert run("bundle", "build", GEMMA, "--dry-run", "-o", tmp_path / "x").exit_code == 0
    assert not (tmp_path / "x").exists()


def test_build_dry_run_with_a_refusal_fails(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text(REFUSED)
    result = run("build", tmp_path / "odd.toml", LLAMA, "--dry-run", "-o", tmp_path / "kernels")
    assert result.exit_code == 1 and "2 to compile, 0 cached, 1 refused" in result.stdout


def test_build_json_ends_with_the_bundle(tmp_path: Path) -> None:
    path = tmp_path / "x.attn"
    lines = run("bundle", "build", GEMMA, "--json", "-o", path).stdout.splitlines()
    *kernels, bundle = map(json.loads, lines)
    assert len(kernels) == bundle["kernels"] == bundle["variants"] == 2
    assert bundle["bytes"] == path.stat().st_size and bundle["sha256"] == Bundle(path).sha256


def test_build_shards_are_a_partition_and_their_merger_is_the_whole(
    gemma: Path, tmp_path: Path
) -> None:
    shards = [tmp_path / f"{index}.attn" for index in (1, 2, 3)]
    for index, path in enumerate(shards, 1):
        assert run("bundle", "build", GEMMA, "--shard", f"{index}/3", "-o", path).exit_code == 0
    assert sum(len(Bundle(path).problems) for path in shards) == 2
    result = run("bundle", "merge", *reversed(shards), "-o", tmp_path / "all.attn")
    assert result.exit_code == 0
    assert (tmp_path / "all.attn").read_bytes() == gemma.read_bytes()


def test_shard_keeps_a_problems_kernels_together_and_no_spec_moves_another() -> None:
    jobs, _ = batch.jobs_of(load_specs(CURATED), None)
    for count in (1, 2, 3, 7):
        shards = [batch.shard(jobs, index, count) for index in range(1, count + 1)]
        assert sorted(job.name for part in shards for job in part) == sorted(j.name for j in jobs)
        homes = [((x.problem, x.arch), number) for number, part in enumerate(shards) for x in part]
        assert len({problem for problem, _ in homes}) == len(set(homes))
        fewer = batch.shard(jobs[:9], 1, count)
        assert fewer == [job for job in shards[0] if job in jobs[:9]]


def test_build_cache_that_cannot_be_written_makes_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "entries").write_text("")
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    result = run("bundle", "build", LLAMA, "-o", tmp_path / "x")
    assert result.exit_code == 1 and "2 failed" in result.stdout
    assert "cannot keep it" in result.stderr
    assert not (tmp_path / "x").exists()


def test_build_into_a_folder_that_others_write_to_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    result = run("build", LLAMA, "-o", tmp_path / "shared")
    assert result.exit_code == 1 and "may be written to by anyone" in result.stderr
    assert "compiled" not in result.stdout and not list((tmp_path / "shared").iterdir())


def test_build_all_cached_needs_to_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("build", LLAMA, "-o", tmp_path)
    monkeypatch.setattr("attngen.cli.build.can_write_into", lambda _: False)
    assert "0 compiled, 2 cached" in run("build", LLAMA, "-o", tmp_path).stdout
    assert "lacks 2 kernels" in run("build", LLAMA, GEMMA, "-o", tmp_path).stderr


@pytest.mark.parametrize("command", [["build", str(LLAMA)], ["merge", "absent.attn"]])
def test_bundle_is_not_put_where_another_file_is_or_none_can_be(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "spec.toml").write_text(REFUSED)
    os.mkfifo(tmp_path / "pipe")
    for output, why in (
        ("spec.toml", "is no bundle"),
        ("spec.toml/x", "cannot be written"),
        ("pipe", "is no bundle"),
    ):
        result = run("bundle", *command, "-o", tmp_path / output)
        assert result.exit_code == 1 and not result.stdout and why in result.stderr
    assert (tmp_path / "spec.toml").read_text() == REFUSED


@pytest.mark.slow
def test_build_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attngen", "build", str(CURATED), "--jobs", "1"]
    # The compiler's own cache could have all of them ready before the signal comes.
    environment = {**os.environ, "ATTNGEN_CACHE_DIR": str(tmp_path), "CUDA_CACHE_DISABLE": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        # A shell's background job, as the tests may be, hands down that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert first.startswith(f"[1/{KERNELS}") and " left] sm90_fwd__full_d64" in first
    assert process.returncode == 1 and len(rest.splitlines()) < 28
    done = len(Cache(tmp_path).entries())
    assert 1 <= done < KERNELS and Cache(tmp_path).verify() == []
    result = CliRunner().invoke(
        main, ["build", str(CURATED), "--dry-run"], env={"ATTNGEN_CACHE_DIR": str(tmp_path)}
    )
    assert f"{KERNELS - done} to compile, {done} cached" in result.stdout


# ---- from a trace


def test_build_from_trace_has_exactly_what_was_used(tmp_path: Path) -> None:
    job, _ = batch.jobs_of(load_specs(LLAMA), None)[0]
    Trace(variants={(job.problem, ARCH): None, (PROBLEM, ARCH): None}).save(tmp_path / "trace")
    result = run("bundle", "build", "--from-trace", tmp_path / "trace", "-o", tmp_path / "x")
    assert result.exit_code == 0
    assert set(Bundle(tmp_path / "x").problems) == {(job.problem, ARCH), (PROBLEM, ARCH)}
    text = (tmp_path / "trace").read_text()
    both = run("bundle", "build", LLAMA, "--from-trace", "-", "-o", tmp_path / "y", stdin=text)
    assert both.exit_code == 0
    assert Bundle(tmp_path / "y").problems[job.problem, ARCH] == ("llama3-8b", "trace")


def test_build_from_trace_of_an_unknown_architecture_is_refused_beside_what_builds(
    tmp_path: Path,
) -> None:
    wide = dataclasses.replace(PROBLEM, head_dim_qk=4096, head_dim_v=4096)
    Trace(variants={(PROBLEM, ARCH): None, (wide, ARCH): None}).save(tmp_path / "trace")
    result = run("build", "--from-trace", tmp_path / "trace", "--dry-run")
    assert result.exit_code == 1 and "1 refused" in result.stdout
    assert "head_dim 4096" in result.stderr
    result = run("build", "--from-trace", tmp_path / "trace", "--arch", "sm_75", "--dry-run")
    assert "2 refused" in result.stdout and "sm_75" in result.stderr


def test_trace_runs_the_command_and_hands_on_its_exit_code(tmp_path: Path) -> None:
    output = tmp_path / "trace"
    program = (
        "import sys; from tests.unit.runtime.test_tracing import use; use(8);"
        " sys.exit(len(sys.argv))"
    )
    command = [sys.executable, "-m", "attngen", "trace", "-o", str(output), "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program, "-o", "--jobs", "x"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4 and f"1 variant noted in {output}" in done.stderr
    killed = subprocess.run([*command, "sh", "-c", "kill -9 $$"], cwd=ROOT, capture_output=True)
    assert killed.returncode == 128 + 9


def test_trace_leaves_the_commands_own_options_alone(tmp_path: Path) -> None:
    result = run("trace", "-o", tmp_path / "trace", "true", "-o", "--verbose", "--help")
    assert result.exit_code == 0 and "0 variants" in result.stderr


def test_trace_of_a_program_without_launches_is_empty_and_says_why(tmp_path: Path) -> None:
    result = run("trace", "-o", tmp_path / "trace", "true")
    assert "0 variants noted" in result.stderr and "no kernel of attngen" in result.stderr
    built = run("bundle", "build", "--from-trace", tmp_path / "trace", "-o", tmp_path / "x")
    assert built.exit_code == 1 and "trace names nothing to build" in built.stderr
    assert not (tmp_path / "x").exists()
    absent = run("bundle", "build", "--from-trace", tmp_path / "none", "-o", tmp_path / "y")
    assert absent.exit_code == 1 and f"{tmp_path / 'none'}: No such file" in absent.stderr


@pytest.mark.parametrize("output", ["file", "file/trace", "."])
def test_trace_where_none_can_be_is_refused_before_anything_runs(
    output: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("an important one\n")
    result = run("trace", "-o", tmp_path / output, "touch", tmp_path / "ran")
    assert result.exit_code == 1 and "Error" in result.stderr
    assert not (tmp_path / "ran").exists()


def test_trace_command_that_does_not_exist_says_so() -> None:
    result = run("trace", "--", "/no/such/program")
    assert result.exit_code == 1 and "/no/such/program: No such file" in result.stderr
