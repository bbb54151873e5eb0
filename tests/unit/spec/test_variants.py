"""Variants of traces: every problem of a spec is taken, nothing else, and each reason is said."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attngen.fragments import features
from attngen.io.values import to_data
from attngen.runtime import tracing
from attngen.spec import coverage, layouts, resolve
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.problem import Problem
from attngen.spec.variants import find_faults
from tests.support.cli_kit import run

ARCH = "sm_90a"
KNOWN = features.scan()
GOOD = resolve.resolve(AttentionSpec(head_dim=128, mask="causal"), KNOWN)[0]
PAGED = resolve.resolve(AttentionSpec(head_dim=64, layout="paged_kv_thd_bshd_bshd"), KNOWN)[0]
# What each field of a spec may be in a random one; switches are off more often than on.
CHOICES: dict[str, list[Any]] = {
    "head_dim": [64, 128, 72, 40, 256, 512, 576, 13],
    "head_dim_v": [None, 64, 128, 512, 16, 13],
    "dtype": [*resolve.DTYPES],
    "kv_dtype": [None, None, *resolve.DTYPES],
    "out_dtype": [None, None, *resolve.DTYPES, "fp32"],
    "grad_dtype": [None, None, None, None, "fp16", "e5m2", "fp32"],
    "d_o_dtype": [None, None, None, "e4m3"],
    "backward": [None, None, None, "mixed"],
    "layout": [*layouts.FORMATS, *layouts.NAMES],
    "mask": ["none", "causal", "causal_bottom_right", "padding", "padding_causal", "arbitrary"],
    "bias": ["none", "none", *resolve.BIASES],
    "softmax": [*KNOWN["softmax"]],
    "directions": [("fwd",), ("fwd", "bwd"), ("bwd",)],
    **{
        field.name: [False, False, False, True]
        for field in dataclasses.fields(AttentionSpec)
        if field.default is False and field.name not in resolve.SWITCHES
    },
}
# A field of a trace's problem, what is written there, and a word of the reason.
WRONG = [
    ("direction", "both", "direction: 'both' is not one of"),
    ("dtype_q", "fp32", "dtype 'fp32' has no kernels"),
    ("dtype_q", "bfloat16", "dtype_q: 'bfloat16' is not one of"),
    ("dtype_kv", "fp16", "kv_dtype 'fp16': allowed beside 'bf16'"),
    ("dtype_o", "e4m3", "out_dtype 'e4m3'"),
    ("dtype_o", None, "dtype_o: None is not one of"),
    ("dtype_grad", "e5m2", "grad_dtype 'e5m2': allowed for 'bf16' queries are ('fp32',)"),
    ("dtype_d_o", "fp8", "dtype_d_o: 'fp8' is not one of"),
    ("head_dim_qk", -1, "head_dim -1"),
    ("head_dim_qk", 0, "head_dim 0"),
    ("head_dim_qk", 10**30, "head_dim_qk: expected 64 bits"),
    ("head_dim_qk", True, "head_dim_qk: expected int, got True"),
    ("head_dim_qk", 128.0, "head_dim_qk: expected int, got 128.0"),
    ("head_dim_qk", float("nan"), "head_dim_qk: expected int, got nan"),
    ("head_dim_v", 513, "head_dim_v 513"),
    ("masks", ["nonsense"], "masks: 'nonsense' is unknown; known: ['causal', 'chunked', "),
    ("masks", ["casual"], "did you mean 'causal'?"),
    ("masks", ["window", "causal"], "masks: ('window', 'causal'), where the nearest spec has"),
    ("masks", ["causal", "causal"], "masks: ('causal', 'causal'), where the nearest spec has"),
    ("masks", "causal", "masks: expected a list"),
    ("masks", ["\x1b[31m"], r"masks: '\x1b[31m' is unknown"),
    ("scores", ["alibi"] * 3, "scores: ('alibi', 'alibi', 'alibi'), where"),
    ("scores", ["alibi", "softcap"], "scores: ('alibi', 'softcap'), where"),
    ("scores", [{}], "scores: expected str, got {}"),
    ("softmax", "../../z", "softmax: '../../z' is unknown"),
    ("softmax", "x" * 5000, "softmax: 'xxxx"),
    ("q_seq", "nonsense", "q_seq: 'nonsense' is not one of"),
    ("kv_seq", "packed", "kv_seq: 'packed', where the nearest spec has 'dense'"),
    ("kv_fetch", "nonsense", "kv_fetch: 'nonsense' is unknown"),
    ("kv_fetch", "page_tma", "kv_fetch: 'page_tma', where the nearest spec has 'tma'"),
    ("kv_iter", "x\n#include <y>", r"kv_iter: 'x\n#include <y>' is unknown"),
    ("kv_iter", "../../../etc/passwd", "kv_iter: '../../../etc/passwd' is unknown"),
    ("deterministic", True, "deterministic: True, where the nearest spec has False"),
    ("deterministic", 1, "deterministic: expected bool, got 1"),
    ("decode", "yes", "decode: expected bool, got 'yes'"),
    ("fragment_digests", ["00"], "fragment_digests: ('00',), where the nearest spec has"),
    ("nonsense", 1, "unknown fields ['nonsense']"),
]


def problems_of_specs() -> Iterator[Problem]:
    """Problems of the covering set, and of random legal specs."""
    for member in coverage.members(KNOWN):
        yield from member.problems(KNOWN)
    chance = random.Random(1)
    for _ in range(20_000):
        spec = AttentionSpec(**{name: chance.choice(all_) for name, all_ in CHOICES.items()})
        if not resolve.find_violations(spec, KNOWN):
            yield from resolve.resolve(spec, KNOWN)


def test_problem_of_any_spec_is_one_that_a_trace_may_name() -> None:
    problems = {*problems_of_specs()}
    assert len(problems) > 500
    assert {each: faults for each in problems if (faults := find_faults(each, ARCH, KNOWN))} == {}


def write_trace(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(("field", "value", "reason"), WRONG, ids=lambda each: str(each)[:20])
@pytest.mark.parametrize("command", [["build"], ["bundle", "build", "-o", "never.attn"]])
def test_trace_of_a_wrong_field_is_refused_with_the_reason(
    command: list[str],
    field: str,
    value: object,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    line = {"arch": ARCH, "problem": {**to_data(GOOD), field: value}}
    trace = write_trace(tmp_path / "trace.jsonl", line)
    result = run(*command, "--from-trace", trace, "--dry-run")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ") and len(result.stderr) < 1000
    assert "trace.jsonl, line 1: " in result.stderr and reason in result.stderr
    assert result.stdout == "" or result.stdout.startswith("0 to compile")


def test_trace_has_every_reason_of_every_line(tmp_path: Path) -> None:
    good = to_data(GOOD)
    lines = [
        {**good, "head_dim_qk": 600, "dtype_kv": "fp16"},
        good,
        {**good, "softmax": "learnble", "masks": ["casual"]},
    ]
    wrong = [{"arch": ARCH, "problem": each} for each in lines] + [
        {"arch": "sm_75", "problem": good}
    ]
    result = run("build", "--dry-run", "--from-trace", write_trace(tmp_path / "t", *wrong))
    said = [line.rpartition("t, ")[2] for line in result.stderr.splitlines()]
    starts = ["line 1: kv_dtype 'fp16'", "line 1: head_dim 600", "line 3: masks: 'casual'"]
    starts += ["line 3: softmax: 'learnble'", "line 4: architecture 'sm_75'"]
    assert result.exit_code == 1 and len(said) == len(starts)
    for line, start in zip(said, starts, strict=True):
        assert line.startswith(start)
    assert "did you mean 'causal'?" in said[2] and "did you mean 'learnable'?" in said[3]
    assert result.stdout.startswith("[1/"), "the sound line is planned all the same"


def test_trace_is_judged_for_the_architecture_that_is_asked_for(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", {"arch": "sm_75", "problem": to_data(GOOD)})
    assert run("build", "--dry-run", "--from-trace", trace).exit_code == 1
    assert run("build", "--dry-run", "--from-trace", trace, "--arch", ARCH).exit_code == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\n", "line 1: not of a trace"),
        (b"\0\n", "line 1: not of a trace"),
        (b"{}\n", "expected an object of arch and problem"),
        (b"NaN\n", "expected an object of arch and problem"),
        (b'{"arch": 7, "problem": {}}\n', "arch: expected str, got 7"),
        (b'{"arch": "sm_90a", "problem": []}\n', "expected an object, got list"),
        (b"[" * 9_999 + b"\n", "nested too deeply"),
        (b"x" * 10_001 + b"\n", "line 1: not of a trace: more than 10000 bytes"),
        (b"9" * 9_000 + b"\n", "line 1: not of a trace"),
        (b'"\\u001b[31m"\x85\n', "line 1: not of a trace"),
        (b"{}\n" * 100_000, "reading ends here"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_trace_of_anything_else_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "t").write_bytes(content)
    result = run("build", "--from-trace", tmp_path / "t")
    assert result.exit_code == 1 and reason in result.stderr
    assert len(result.stderr) < 100_000 and "\x1b" not in result.stderr


@pytest.mark.timeout(30)
def test_trace_that_does_not_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run("build", "--from-trace", "/dev/zero").stderr
    assert "/dev/zero: not a regular file" in said
    monkeypatch.setattr(tracing, "BYTE_LIMIT", 99)
    (tmp_path / "t").write_bytes(bytes(100))
    assert "t: more than 99 bytes" in run("build", "--from-trace", tmp_path / "t").stderr
    assert "-: more than 99 bytes" in run("build", "--from-trace", "-", stdin="x" * 100).stderr


def test_trace_of_pages_is_taken(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", {"arch": ARCH, "problem": to_data(PAGED)})
    assert run("build", "--dry-run", "--from-trace", trace).exit_code == 0
