"""`attngen bundle` on bundles that are there: what it prints, and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attngen.compiler import batch
from attngen.compiler.cache import Cache
from attngen.ship import writer as bundle_write
from attngen.ship.bundle import Bundle
from attngen.spec.attention_spec import load_specs
from tests.support.bundle_kit import make_program, write
from tests.support.cache_kit import ARCH
from tests.support.cli_kit import CURATED, GEMMA, LLAMA, run


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


def test_verify_intact_damaged_and_incomplete(gemma: Path, tmp_path: Path) -> None:
    result = run("bundle", "verify", gemma, "--require", GEMMA)
    assert result.exit_code == 0 and "intact" in result.stdout
    incomplete = run("bundle", "verify", gemma, "--require", GEMMA, "--require", LLAMA)
    assert incomplete.exit_code == 1 and "llama3-8b" in incomplete.stderr
    assert f"attngen bundle build {GEMMA} {LLAMA} -o NAME.attn" in incomplete.stderr
    data = bytearray(gemma.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    damaged = run("bundle", "verify", tmp_path / "damaged")
    said = bytes(data[-64:-52]).decode()
    assert damaged.exit_code == 1 and f", not {said}…" in damaged.stderr


def test_ls_names_kernels_and_specs(gemma: Path) -> None:
    lines = run("bundle", "ls", gemma).stdout.splitlines()
    assert len(lines) == 2 and all(re.search(r"sm_90a +\d+ kB +\d+ registers", x) for x in lines)
    assert {line.split()[-1] for line in lines} == {"gemma3-local", "gemma3-global"}
    records = [json.loads(x) for x in run("bundle", "ls", gemma, "--json").stdout.splitlines()]
    assert {record["specs"][0] for record in records} == {"gemma3-local", "gemma3-global"}
    assert all(record["plan"]["arch"] == ARCH and record["digest"] for record in records)
    for record in records:
        assert 0 < record["stored_bytes"] < record["resources"]["cubin_bytes"] / 2


def test_diff_exit_codes_are_those_of_diff(tmp_path: Path) -> None:
    one = write(tmp_path / "1", make_program(64, "a"), make_program(96, "b"))
    two = write(tmp_path / "2", make_program(64, "c"), make_program(128, "b"))
    assert (run("bundle", "diff", one, one).exit_code, run("bundle", "diff", one, one).stdout) == (
        0,
        "",
    )
    result = run("bundle", "diff", one, two)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "+ causal_d128_bf16 (fwd, sm_90a)",
        "~ causal_d64_bf16 (fwd, sm_90a): another plan",
        "- causal_d96_bf16 (fwd, sm_90a)",
    ]
    trouble = run("bundle", "diff", one, tmp_path / "absent")
    assert trouble.exit_code == 2 and "absent" in trouble.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"toolchain": "nvrtc 13.1"}, "another toolchain"),
        ({"source_sha256": "1" * 64}, "another source"),
    ],
)
def test_diff_says_what_made_the_difference(
    changes: dict[str, str], reason: str, tmp_path: Path
) -> None:
    one = write(tmp_path / "1", make_program(64, "a"))
    two = write(tmp_path / "2", make_program(64, "a", **changes))
    assert reason in run("bundle", "diff", one, two).stdout


def test_merge_conflict_names_both_and_writes_nothing(tmp_path: Path) -> None:
    one, two = (write(tmp_path / tag, make_program(64, tag)) for tag in "ab")
    result = run("bundle", "merge", one, two, "-o", tmp_path / "m")
    assert result.exit_code == 1 and str(one) in result.stderr and str(two) in result.stderr
    assert not (tmp_path / "m").exists()


def test_wheel_is_written_where_it_is_wanted(gemma: Path, tmp_path: Path) -> None:
    result = run("bundle", "wheel", gemma, "--name", "acme-kernels", "-o", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "acme_kernels-0.1.0-py3-none-any.whl")
    assert run("bundle", "wheel", gemma, "--name", "../x", "-o", tmp_path).exit_code == 1


def test_bundle_commands_on_what_is_no_bundle_give_a_message(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    for command in (["verify"], ["ls"], ["merge", "-o", "x"], ["wheel", "--name", "x"]):
        for name in ("junk", "absent"):
            result = run("bundle", *command, tmp_path / name)
            assert result.exit_code == 1 and str(tmp_path / name) in result.stderr


def test_batch_bundle_keeps_kernels_of_a_backward_in_their_order(tmp_path: Path) -> None:
    jobs = [job for job in batch.jobs_of(load_specs(CURATED), None)[0] if "full_d256" in job.name]
    backward = [job for job in jobs if job.problem.direction == "bwd"]
    cache = Cache(tmp_path / "cache")
    outcomes = sorted(batch.run(backward, cache), key=lambda o: o.job.name)
    bundle_write.write(
        tmp_path / "x", batch.programs_of(outcomes), batch.cubins_of(outcomes, cache)
    )
    (program,) = Bundle(tmp_path / "x").verify()
    assert [kernel.plan["family"] for kernel in program.kernels] == [
        job.plan.family for job in backward
    ]
    cache.clear()
    with pytest.raises(Exception, match="has lost it"):
        batch.cubins_of(outcomes, cache)(program.binaries[0])
