"""The attngen command: what it prints, its exit codes, and what it may not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attngen.cli.main import main
from attngen.compiler import batch
from attngen.compiler.cache import Cache
from attngen.compiler.explain import to_toml
from attngen.fragments import features
from attngen.io.values import to_data
from attngen.spec import resolve
from attngen.spec.attention_spec import AttentionSpec, load_specs
from attngen.targets import target
from tests.support.paths import ROOT

LLAMA = ROOT / "examples" / "specs" / "llama3-8b.toml"
GEMMA = ROOT / "examples" / "specs" / "gemma3.toml"

GOOD = '[[kernel]]\nname = "good"\nhead_dim = 64\n'
REFUSED = '[[kernel]]\nname = "odd"\nhead_dim = 580\nmask = "spiral"\nhead_dim_v = 128\n'
# File content → what the message says of it.
BAD_SPECS = {
    "unknown key": ("[[kernel]]\nhead_dim = 64\nheads = 8\n", "heads"),
    "unknown table": ("[[kernel]]\nhead_dim = 64\n[extra]\n", "extra"),
    "wrong type": ('[[kernel]]\nhead_dim = "64"\n', "head_dim"),
    "missing key": ('[[kernel]]\nmask = "causal"\n', "head_dim"),
    "empty": ("", "no [[kernel]]"),
    "not TOML": ("[[kernel\nhead_dim = 64", "bad.toml"),
    "binary": (b"\x7fELF\x00\xff\xfe\x80", "bad.toml"),
    "defaults no table": ("defaults = 3\n", "[defaults]"),
}
# Blocks imports as if nothing were installed, then runs the command.
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in {blocked!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
{code}
"""
RUN_MAIN = "from attngen.cli.main import main; main({arguments!r})"
COMPILER = ("jinja2", "cuda.bindings.nvrtc", "cuda.bindings.cynvrtc", "cutlass", "cuda.core")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)
    return tmp_path / "cache"


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_python(code: str, blocked: tuple[str, ...] = (), **environment: str) -> str:
    """stdout of a process that sees neither the blocked modules nor the tests' directory."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked, code=code)],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_build_new_spec_compiles_then_finds_it_cached() -> None:
    first, second = run("build", LLAMA), run("build", LLAMA)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "compiled in" in first.stdout and "2 compiled, 0 cached" in first.stdout
    assert "0 compiled, 2 cached" in second.stdout


def test_build_output_directory_is_a_cache_that_works_alone(
    tmp_path: Path, cache_dir: Path
) -> None:
    assert run("build", GEMMA, "-o", tmp_path / "kernels").exit_code == 0
    assert len(Cache(tmp_path / "kernels").entries()) == 2
    assert not cache_dir.exists()
    code = f"""
from attngen import build, load_specs
print([built.from_cache for spec in load_specs({str(GEMMA)!r}) for built in build(spec)])
"""
    environment = {"ATTNGEN_CACHE_DIR": str(tmp_path / "kernels"), "ATTNGEN_DISABLE_JIT": "1"}
    assert run_python(code, COMPILER, **environment).strip() == "[True, True]"


def test_build_kernel_named_by_two_specs_is_compiled_once(tmp_path: Path) -> None:
    text = '[[kernel]]\nname = "a"\nhead_dim = 128\nmask = "causal_bottom_right"\n'
    result = run("build", LLAMA, write(tmp_path / "again.toml", text))
    assert "2 compiled, 0 cached" in result.stdout
    assert "llama3-8b a" in result.stdout


def test_build_one_refused_spec_still_builds_the_others(tmp_path: Path) -> None:
    result = run("build", write(tmp_path / "mixed.toml", GOOD + REFUSED))
    assert result.exit_code == 1
    assert "2 compiled, 0 cached, 1 failed" in result.stdout
    assert "head_dim 580" in result.stderr and "spiral" in result.stderr


def test_build_directory_that_cannot_be_written_fails(tmp_path: Path) -> None:
    result = run("build", LLAMA, "-o", write(tmp_path / "file", "") / "kernels")
    assert result.exit_code == 1 and not result.stdout  # nothing was compiled
    assert "cannot be written, and lacks 2 kernels" in result.stderr


def test_build_unknown_architecture_says_which_exist() -> None:
    result = run("build", LLAMA, "--arch", "sm_12")
    assert result.exit_code == 1
    assert "sm_12" in result.stderr and "sm_90a" in result.stderr


def test_build_with_jit_disabled_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    assert "2 compiled" in run("build", LLAMA).stdout


def test_build_json_prints_one_object_a_kernel() -> None:
    lines = [json.loads(line) for line in run("build", GEMMA, "--json").stdout.splitlines()]
    assert {line["specs"][0] for line in lines} == {"gemma3-local", "gemma3-global"}
    assert all(line["resources"]["registers"] > 0 and not line["cached"] for line in lines)


def test_build_jobs_of_a_product_are_distinct() -> None:
    jobs, refused = batch.jobs_of(load_specs(ROOT / "examples/specs/curated.toml"), None)
    assert not refused
    assert len({(job.name, job.arch) for job in jobs}) == len(jobs) == 82


@pytest.mark.parametrize("command", ["build", "list", "explain", "render"])
@pytest.mark.parametrize("defect", BAD_SPECS)
def test_command_bad_spec_file_gives_a_message_and_exit_1(
    command: str, defect: str, tmp_path: Path
) -> None:
    content, expected = BAD_SPECS[defect]
    result = run(command, write(tmp_path / "bad.toml", content))
    assert result.exit_code == 1
    assert expected in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("command", ["build", "explain", "render"])
def test_command_spec_without_kernel_lists_every_reason(command: str, tmp_path: Path) -> None:
    result = run(command, write(tmp_path / "refused.toml", REFUSED))
    assert result.exit_code == 1
    assert "head_dim 580" in result.stderr and "'spiral'" in result.stderr


@pytest.mark.parametrize("command", ["build", "list", "explain", "render"])
def test_command_missing_file_gives_a_message(command: str, tmp_path: Path) -> None:
    result = run(command, tmp_path / "none.toml")
    assert result.exit_code == 1
    assert "none.toml" in result.stderr


def test_build_without_arguments_is_a_usage_error() -> None:
    assert run("build").exit_code == 2


def test_list_shows_every_fragment_with_its_doc() -> None:
    text = run("list").stdout
    for fragments in features.scan().values():
        for fragment in fragments.values():
            assert fragment.name in text and fragment.doc in text
    assert all(word in text for word in (*resolve.DTYPES, *target.names()))


def test_list_spec_files_show_kernels_and_refusals(tmp_path: Path) -> None:
    result = run("list", GEMMA, write(tmp_path / "refused.toml", REFUSED))
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["gemma3-local", "gemma3-global", "odd"]
    assert "causal_window_d256_bf16" in lines[0]
    assert all(word in lines[2] for word in ("refused", "head_dim 580", "'spiral'"))


def test_list_of_a_refused_spec_exits_1_once_all_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "mixed.toml", REFUSED + GOOD)
    for options in ([], ["--json"]):
        result = run("list", path, *options)
        assert result.exit_code == 1 and len(result.stdout.splitlines()) == 2
        assert "1 spec without a kernel" in result.stderr
    assert run("list", write(tmp_path / "good.toml", GOOD)).exit_code == 0


def test_list_json_has_what_each_kernel_computes_or_each_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "mixed.toml", REFUSED + GOOD)
    refused, good = map(json.loads, run("list", path, "--json").stdout.splitlines())
    assert refused["spec"] == "odd"
    assert [(each["field"], each["place"]) for each in refused["refused"]] == [
        ("head_dim", f"{path}, line 3"),
        ("mask", f"{path}, line 4"),
    ]
    (problem,) = resolve.resolve(AttentionSpec(head_dim=64), features.scan())
    assert good.pop("problem") == to_data(problem)
    assert good == {"spec": "good", "arch": "sm_90a", "label": problem.label, "refused": None}


def test_list_json_of_no_spec_file_is_a_usage_error() -> None:
    assert run("list", "--json").exit_code == 2


@pytest.mark.parametrize("command", ["build", "explain", "list", "render"])
def test_refusal_names_the_line_and_what_was_meant(command: str, tmp_path: Path) -> None:
    text = '[defaults]\ndtype = "bfloat16"\n\n[[kernel]]\nhead_dim = 64\nmask = "casual"\n'
    path = write(tmp_path / "slips.toml", text + 'softmax = "learnble"\nlayout = "bhsdd"\n')
    result = run(command, path, *(["--json"] if command == "list" else []))
    said = result.stderr.splitlines()
    if command == "list":
        (listed,) = map(json.loads, result.stdout.splitlines())
        said = [f"{each['place']}: {each['reason']}" for each in listed["refused"]]
    for line, meant in ((2, "bf16"), (6, "causal"), (7, "learnable"), (8, "bhsd")):
        (reason,) = [each for each in said if f"slips.toml, line {line}: " in each]
        assert f"did you mean {meant!r}?" in reason


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["explain", str(GEMMA), "--name", "gemma3-locl"], "gemma3-local"),
        (["doctor", "cahce"], "cache"),
        (["specs", "lama3-8b"], "llama3-8b"),
    ],
)
def test_unknown_name_is_told_the_one_that_it_may_mean(words: list[str], meant: str) -> None:
    assert f"did you mean {meant!r}" in run(*words).stderr


def test_explain_legal_spec_prints_each_stage_in_turn() -> None:
    text = run("explain", GEMMA, "--name", "gemma3-local").stdout
    heads = [line.split()[0] for line in text.splitlines() if line[:1] not in ("", " ")]
    assert heads == ["spec", "problem", "plan", "roofline", "source", "binary"]
    assert "causal window" in text and "registers" in text and "gemma3-global" not in text


def test_explain_no_compile_needs_no_compiler() -> None:
    arguments = ["explain", str(LLAMA), "--no-compile"]
    text = run_python(RUN_MAIN.format(arguments=arguments), COMPILER[1:])
    assert "\nsource " in text and "\nbinary " not in text


def test_explain_refused_spec_ends_with_a_legal_one(tmp_path: Path) -> None:
    refusal = run("explain", write(tmp_path / "refused.toml", REFUSED)).stderr
    table = "[[kernel]]" + refusal.partition("[[kernel]]")[2]
    (nearest,) = load_specs(write(tmp_path / "nearest.toml", table))
    assert nearest.head_dim == 576 and nearest.name == "odd"
    assert resolve.find_violations(nearest, features.scan()) == []


def test_explain_goes_on_after_a_refusal_and_exits_1(tmp_path: Path) -> None:
    path = write(tmp_path / "three.toml", REFUSED + GOOD + REFUSED.replace("odd", "other"))
    result = run("explain", path, "--no-compile")
    assert result.exit_code == 1
    assert "spec good" in result.stdout
    assert "odd has no kernel" in result.stderr and "other has no kernel" in result.stderr


def test_list_coverage_of_spec_files_is_a_usage_error() -> None:
    assert run("list", "--coverage", GEMMA).exit_code == 2


@pytest.mark.parametrize("command", [["build"], ["render"]])
def test_output_directory_that_is_a_file_is_refused_before_anything_is_built(
    command: list[str], tmp_path: Path
) -> None:
    result = run(*command, GEMMA, "-o", write(tmp_path / "file", ""))
    assert result.exit_code == 2 and "is a file" in result.stderr and not result.stdout


def test_bundle_in_the_place_of_a_directory_is_refused_before_anything_is_built(
    tmp_path: Path,
) -> None:
    result = run("bundle", "build", GEMMA, "-o", tmp_path)
    assert result.exit_code == 2 and "is a directory" in result.stderr and not result.stdout


def test_explain_unknown_name_lists_the_names() -> None:
    result = run("explain", GEMMA, "--name", "gemma4")
    assert result.exit_code == 1
    assert "gemma3-local" in result.stderr


def test_to_toml_read_back_is_the_same_spec(tmp_path: Path) -> None:
    spec = AttentionSpec(
        head_dim=96, out_dtype="fp32", window=True, name='a "quoted" näme', arch=("sm_90a", "x")
    )
    path = write(tmp_path / "spec.toml", "\n".join(to_toml(spec)))
    assert load_specs(path) == (spec,)


def test_render_prints_what_it_writes(tmp_path: Path) -> None:
    printed = run("render", LLAMA).stdout
    assert run("render", LLAMA, "-o", tmp_path / "out").exit_code == 0
    paths = [*(tmp_path / "out").iterdir()]
    assert sum(len(path.read_text()) for path in paths) == len(printed)
    assert all(path.read_text() in printed and path.stem in printed for path in paths)
    assert printed.count('extern "C"') == len(paths) == 2


def test_list_with_its_output_closed_ends_quietly() -> None:
    command = f"{sys.executable} -m attngen list >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_cache_commands_see_what_was_built(cache_dir: Path) -> None:
    run("build", GEMMA)
    assert run("cache", "dir").stdout.strip() == str(cache_dir)
    assert len(run("cache", "ls").stdout.splitlines()) == 2
    listed = [json.loads(line) for line in run("cache", "ls", "--json").stdout.splitlines()]
    entries = Cache(cache_dir).entries()
    assert [(each["digest"], each["path"]) for each in listed] == [
        (entry.digest, str(entry.path)) for entry in entries
    ]
    assert {each["arch"] for each in listed} == {"sm_90a"} and listed[0]["bytes"] > 1000
    assert "2 kernels, all intact" in run("cache", "verify").stdout
    assert "removed 2 kernels" in run("cache", "prune", "--max-bytes", 0).stdout
    assert "removed 0 kernels" in run("cache", "clear").stdout


def test_cache_clear_of_what_cannot_be_removed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run("build", LLAMA)
    monkeypatch.setattr(Cache, "_discard", lambda *_: False)
    result = run("cache", "clear")
    assert result.exit_code == 1 and "removed 0 kernels" in result.stdout
    assert "2 kernels could not be removed" in result.stderr


def test_cache_verify_damaged_entry_exits_1(cache_dir: Path) -> None:
    run("build", LLAMA)
    info, _ = Cache(cache_dir).entries()
    cubin = max(info.path.iterdir(), key=lambda path: path.stat().st_size)
    cubin.write_bytes(cubin.read_bytes()[:-1])
    result = run("cache", "verify")
    assert result.exit_code == 1
    assert str(info.path) in result.stderr


def test_cache_prune_without_limit_is_a_usage_error() -> None:
    assert run("cache", "prune").exit_code == 2
