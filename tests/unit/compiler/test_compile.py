"""Compiling: kernels are fast ones or they do not leave; errors, determinism, no driver."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest

from attngen.compiler import compile as compiler
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source, find_defects, read_resources, run_nvrtc
from attngen.errors import CompileError
from attngen.io import files
from attngen.kernels.fill import Source
from attngen.kernels.plan import plans
from attngen.runtime.program import SCHEMA_VERSION, Resources
from tests.support.sass import count_instructions, find_split_warpgroups, read_usage

pytestmark = pytest.mark.timeout(300)

ARCH = "sm_90a"
CAUSAL, WINDOW, BOTH = ("causal",), ("window",), ("causal", "window")
CASES = {
    "d8": {"head_dim": 8},
    "d64": {"head_dim": 64},
    "d64 causal": {"head_dim": 64, "masks": CAUSAL},
    "d64 causal partial": {"head_dim": 64, "masks": CAUSAL, "out": "fp32"},
    "d96 window fp16": {"head_dim": 96, "masks": WINDOW, "dtype": "fp16"},
    "d128 fp16": {"head_dim": 128, "dtype": "fp16"},
    "d128 causal": {"head_dim": 128, "masks": CAUSAL},
    "d128 both": {"head_dim": 128, "masks": BOTH},
    "d192v128 causal": {"head_dim": 192, "head_dim_v": 128, "masks": CAUSAL},
    "d192v128 window": {"head_dim": 192, "head_dim_v": 128, "masks": WINDOW},
    "d72v248 causal": {"head_dim": 72, "head_dim_v": 248, "masks": CAUSAL},
    "d256v8": {"head_dim": 256, "head_dim_v": 8},
    "d256": {"head_dim": 256},
    "d256 causal": {"head_dim": 256, "masks": CAUSAL},
    "d256 both partial": {"head_dim": 256, "masks": BOTH, "out": "fp32"},
    "d64 both arbitrary dropout": {
        "head_dim": 64,
        "masks": BOTH,
        "attn_mask": True,
        "dropout": True,
    },
    "d128 causal dropout": {"head_dim": 128, "masks": CAUSAL, "dropout": True},
    "d128 both arbitrary": {"head_dim": 128, "masks": BOTH, "attn_mask": True},
    "d256 arbitrary dropout": {"head_dim": 256, "attn_mask": True, "dropout": True},
}
PARAMS_BASE = 0x240  # where a 64-byte aligned parameter struct begins in constant bank 0
REPORT = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""


@pytest.fixture(scope="module")
def built(make_problem, render):
    """`built(case)` → (source, binary, cubin), compiled once."""

    @cache
    def compile_case(case: str):
        problem = make_problem(**CASES[case])
        source = render(problem)
        return source, *compile_source(source, problem, ARCH)

    return compile_case


def compile_again(source: Source) -> bytes:
    """The cubin of a source under the name that `compile_source` gives it."""
    return run_nvrtc(source.text, f"{source.kernel.entry}.cu", ARCH).cubin


def altered(source: Source, pattern: str, replacement: str) -> Source:
    text, count = re.subn(pattern, replacement, source.text)
    assert count >= 1, f"nothing in the kernel matches {pattern}"
    return replace(source, text=text)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_kernel_has_no_spills_and_the_instructions_that_make_it_fast(case: str, built) -> None:
    source, binary, cubin = built(case)
    assert (binary.resources.spill_bytes, binary.resources.stack_bytes) == (0, 0)
    assert binary.resources.cubin_bytes == len(cubin)
    found = count_instructions(cubin)
    assert found["HGMMA"] > 0 and found["UTMALDG"] > 0
    assert (found["STL"], found["LDL"]) == (0, 0)
    assert found["USETMAXREG"] == 2, "registers do not move from the producer to the consumers"
    assert find_split_warpgroups(cubin) == []
    assert (found["UTMASTG"] > 0) == ("map_o" in {field.name for field in source.kernel.fields})


@pytest.mark.slow
@pytest.mark.parametrize("alibi", [False, True], ids=("softcap", "softcap and ALiBi"))
def test_warps_that_bend_scores_in_ways_of_their_own_await_products_together(
    alibi, make_problem
) -> None:
    problem = make_problem(128, masks=CAUSAL, scores=("softcap", "alibi")[: 1 + alibi])
    for each in plans(problem, ARCH):
        _, cubin = compile_source(render_problem(problem, each), problem, ARCH)
        assert find_split_warpgroups(cubin) == []


@pytest.mark.slow
def test_find_split_warpgroups_finds_warps_that_await_a_product_in_two_places(built) -> None:
    source, _, _ = built("d128 causal")
    split = altered(
        source,
        r"await_product\(\);\n    softmax\.weigh",
        "if (grew) { await_product(); rescale[0] += 1; } else await_product();\n    softmax.weigh",
    )
    assert find_split_warpgroups(compile_again(split))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_kernel_figures_of_the_cubin_are_those_of_the_binary(case: str, built) -> None:
    source, binary, cubin = built(case)
    usage = read_usage(cubin)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0)
    assert usage["REG"] == binary.resources.registers
    assert usage["REG"] == 65536 // source.kernel.threads // 8 * 8
    assert usage["CONSTANT[0]"] == PARAMS_BASE + source.kernel.params_bytes


def test_compile_source_binary_describes_what_it_was_made_of(built, make_problem) -> None:
    source, binary, cubin = built("d64 causal")
    assert binary.schema == SCHEMA_VERSION and binary.arch == ARCH
    assert binary.problem == make_problem(64, masks=CAUSAL)
    assert binary.kernel == source.kernel
    assert binary.source_sha256 == hashlib.sha256(source.text.encode()).hexdigest()
    assert binary.cubin_sha256 == hashlib.sha256(cubin).hexdigest()
    assert re.fullmatch(r"nvrtc \d+\.\d+", binary.toolchain)
    assert cubin.startswith(b"\x7fELF") and source.kernel.entry.encode() in cubin


def test_run_nvrtc_twice_gives_the_same_bytes(built) -> None:
    source, _, cubin = built("d64")
    assert compile_again(source) == cubin


def test_run_nvrtc_with_an_empty_log_leaves_pythons_own_bytes_alone() -> None:
    """An empty log is one zero byte long, and Python keeps one object for each such string."""
    script = (
        "from attngen.compiler import compile;"
        "compile.OPTIONS = ('--no-cache',);"
        f"print(len(compile.run_nvrtc('__global__ void f() {{}}', 'f.cu', {ARCH!r}).log), 'log');"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"0 log\n"


@pytest.mark.slow
def test_run_nvrtc_in_threads_gives_the_bytes_of_one_alone(built) -> None:
    cases = ("d8", "d64")
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(lambda case: compile_again(built(case)[0]), cases * 2)
        assert [*done] == [built(case)[2] for case in cases * 2]


def test_run_nvrtc_fresh_process_gives_the_same_bytes_without_torch_or_cuda_core(built) -> None:
    """cuda.core hangs at its second touch of a driver that is not there."""
    source, _, cubin = built("d8")
    script = (
        "import hashlib, sys; from attngen.compiler.compile import run_nvrtc;"
        f"cubin = run_nvrtc(sys.stdin.read(), '{source.kernel.entry}.cu', {ARCH!r}).cubin;"
        "print(hashlib.sha256(cubin).hexdigest());"
        "print(*(name for name in ('cuda.core', 'torch') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=source.text,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(files.include_dir().parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hashlib.sha256(cubin).hexdigest()}\n\n"


def test_compile_source_syntax_error_is_refused_with_the_log(built, make_problem) -> None:
    source = altered(built("d8")[0], r"constexpr int kTileM = ", "constexpr int kTileM = oops + ")
    with pytest.raises(CompileError, match=r'identifier "oops" is undefined') as caught:
        compile_source(source, make_problem(8), ARCH)
    assert source.kernel.entry in str(caught.value)


def test_run_nvrtc_failed_compile_leaves_the_next_one_whole(built) -> None:
    source, _, cubin = built("d8")
    with pytest.raises(CompileError):
        run_nvrtc("int main( {", "broken.cu", ARCH)
    assert compile_again(source) == cubin


def test_run_nvrtc_unknown_architecture_is_refused() -> None:
    with pytest.raises(CompileError, match="INVALID_OPTION"):
        run_nvrtc("", "k.cu", "sm_1")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("pattern", "replacement", "defect"),
    [
        (r"kConsumerRegisters = \d+", "kConsumerRegisters = 104", "C7512"),
        (r"__launch_bounds__\([^)]*\)", "", "C7508"),
        (r"await_product\(\);\n    softmax\.weigh", "softmax.weigh", "C751"),
    ],
    ids=("serialised wgmma", "ignored setmaxnreg", "operands overwritten in flight"),
)
def test_compile_source_planted_defect_never_leaves(
    pattern, replacement, defect, built, make_problem
) -> None:
    problem = make_problem(**CASES["d128 causal"])
    source = altered(built("d128 causal")[0], pattern, replacement)
    with pytest.raises(CompileError, match=defect) as caught:
        compile_source(source, problem, ARCH)
    assert all(source.kernel.entry in reason for reason in caught.value.reasons)


def test_compile_source_local_memory_is_a_warning(built, make_problem, caplog) -> None:
    """A user's score_mod that keeps much, or another NVRTC, would else leave no kernel at all."""
    problem = make_problem(**CASES["d128 causal"])
    source = altered(
        built("d128 causal")[0],
        "extern __shared__",
        "volatile int kept[8]; kept[threadIdx.x & 7] = 1; extern __shared__",
    )
    binary, _ = compile_source(source, problem, ARCH)
    assert binary.resources.in_local_memory == "0 bytes of spills, 32 bytes of stack"
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert source.kernel.entry in record.message and "32 bytes of stack" in record.message


def test_find_defects_clean_report_has_none() -> None:
    assert find_defects(REPORT) == []
    assert read_resources(REPORT, 7) == Resources(168, 0, 0, 7)


@pytest.mark.parametrize("code", ("C7504", "C7508", "C7510", "C7512", "C7513", "C7514", "C7519"))
def test_find_defects_each_advisory_is_one(code: str) -> None:
    line = f"ptxas info    : ({code}) Potential Performance Loss: something"
    assert find_defects(f"{REPORT}{line}\n") == [line]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0 bytes spill stores", "8 bytes spill stores", Resources(168, 8, 0, 7)),
        ("0 bytes stack frame", "16 bytes stack frame", Resources(168, 0, 16, 7)),
    ],
)
def test_read_resources_any_spill_or_stack_shows(old: str, new: str, expected) -> None:
    resources = read_resources(REPORT.replace(old, new), 7)
    assert resources == expected
    assert resources.in_local_memory and not read_resources(REPORT, 7).in_local_memory


def test_read_resources_several_kernels_give_the_worst() -> None:
    worse = REPORT.replace("168", "255").replace("0 bytes spill stores", "40 bytes spill stores")
    assert read_resources(worse + REPORT, 7) == Resources(255, 40, 0, 7)


def test_heartbeat_long_compile_logs_until_it_ends(monkeypatch) -> None:
    monkeypatch.setattr(compiler, "HEARTBEAT_SECONDS", 0.01)
    seen = threading.Event()
    monkeypatch.setattr(compiler.log, "info", lambda *_: seen.set())
    with compiler._Heartbeat("k"):
        assert seen.wait(10)
    seen.clear()
    assert not seen.wait(0.1)


def test_heartbeat_that_beats_while_the_compile_ends_beats_no_more(monkeypatch) -> None:
    """A beat under way when the compile ends must not schedule the next."""
    monkeypatch.setattr(compiler, "HEARTBEAT_SECONDS", 0.01)
    entered, ended, beats = threading.Event(), threading.Event(), []

    def log_slowly(*_: object) -> None:
        beats.append(None)
        entered.set()
        ended.wait(10)

    monkeypatch.setattr(compiler.log, "info", log_slowly)
    with compiler._Heartbeat("k"):
        assert entered.wait(10)
    ended.set()
    threading.Event().wait(0.2)
    assert len(beats) == 1
