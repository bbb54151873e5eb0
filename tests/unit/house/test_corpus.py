"""Hashes of the corpus: kernels are what they were, and what changes a kernel changes its hash."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.base import KernelPlan
from attngen.kernels.fill import Source
from attngen.kernels.plan import plans
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.problem import Problem
from attngen.spec.resolve import resolve
from attngen.targets.target import DEFAULT
from tools import corpus

HEADERS = {
    "attngen/a.cuh": b'#pragma once\n#include "attngen/b.cuh"  // 1st\nint a = 1;  /* 1\n2 */\n',
    "attngen/b.cuh": b"#pragma once\n#include <cuda.h>\n\nint b = 2;\n",
}
SOURCE = '// entry\n#include "attngen/a.cuh"\n#include "attngen/b.cuh"\n\n  int c = a + b;  // c\n'
FLAT = "#include <cuda.h>\nint b = 2;\nint a = 1;\nint c = a + b;"


@pytest.fixture
def kernel() -> tuple[Problem, KernelPlan]:
    (problem,) = resolve(AttentionSpec(head_dim=64, mask="causal"), features.scan())
    return problem, plans(problem, "sm_90a")[0]


@pytest.mark.slow
def test_kernels_are_what_they_were() -> None:
    lines = corpus.differences(json.loads(corpus.HASHES.read_text()), corpus.corpus())
    assert not lines, "\n".join([*lines, "if this is meant: make generated"])


def test_some_kernels_are_what_they_were() -> None:
    """One in eight, so that a change that meant no kernel shows early."""
    kept = json.loads(corpus.HASHES.read_text())
    for problem in [*dict.fromkeys(corpus.problems())][::8]:
        for each in plans(problem, DEFAULT.name):
            name, hashes = corpus.hashes_of(problem, each)
            assert hashes in kept.get(name, ()), f"{name}; if this is meant: make generated"


def test_flat_source_has_each_header_once_and_no_comments() -> None:
    assert corpus.flatten(SOURCE, HEADERS) == FLAT


def test_renamed_and_split_headers_make_the_same_source() -> None:
    moved = {
        "attngen/new/first.cuh": HEADERS["attngen/a.cuh"].replace(b"b.cuh", b"new/rest.cuh"),
        "attngen/new/rest.cuh": b'#include "attngen/c.cuh"\n// moved\n  int b = 2;',
        "attngen/c.cuh": b"#include <cuda.h>",
    }
    source = SOURCE.replace("a.cuh", "new/first.cuh").replace("b.cuh", "new/rest.cuh")
    assert corpus.flatten(source, moved) == FLAT


def test_text_in_quotes_is_no_comment() -> None:
    assert corpus.without_comments('f("http://x/*", "\\"//");  // y') == 'f("http://x/*", "\\"//");'


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda source: source.text + "\n// a comment\n", True),
        (lambda source: source.text.replace("constexpr int ", "constexpr  int ", 1), False),
        (lambda source: source.text + "\nint more;\n", False),
    ],
    ids=["comment", "token spacing", "code"],
)
def test_hash_of_the_source_follows_its_code(
    kernel: tuple[Problem, KernelPlan],
    change: Callable[[Source], str],
    same: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, before = corpus.hashes_of(*kernel)
    source = render_problem(*kernel)
    other = dataclasses.replace(source, text=change(source))
    monkeypatch.setattr(corpus, "render_problem", lambda *_: other)
    assert (corpus.hashes_of(*kernel) == (name, before)) == same
    assert corpus.hashes_of(*kernel)[1].split()[1] == before.split()[1]


def test_hash_of_the_launch_follows_its_description_and_not_the_digest(
    kernel: tuple[Problem, KernelPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = corpus.hashes_of(*kernel)
    source = render_problem(*kernel)
    entry = source.kernel.entry
    digest = entry.rpartition("__")[2]
    renamed = dataclasses.replace(
        source,
        text=source.text.replace(digest, "0" * 6),
        kernel=dataclasses.replace(source.kernel, entry=entry.replace(digest, "0" * 6)),
    )
    monkeypatch.setattr(corpus, "render_problem", lambda *_: renamed)
    assert corpus.hashes_of(*kernel)[1] == before
    larger = dataclasses.replace(source.kernel, smem_bytes=source.kernel.smem_bytes + 16)
    changed = dataclasses.replace(source, kernel=larger)
    monkeypatch.setattr(corpus, "render_problem", lambda *_: changed)
    text, launch = corpus.hashes_of(*kernel)[1].split()
    assert text == before.split()[0] and launch != before.split()[1]


def test_hash_of_the_source_follows_headers(
    kernel: tuple[Problem, KernelPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = corpus.hashes_of(*kernel)
    name = "attngen/softmax/row.cuh"
    edited = files.headers() | {name: files.headers()[name] + b"\nint more;\n"}
    monkeypatch.setattr(files, "headers", lambda: edited)
    assert corpus.hashes_of(*kernel)[1].split()[0] != before.split()[0]


def test_check_names_kernels_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hashes.json"
    monkeypatch.setattr(corpus, "corpus", lambda: {"a": ["1 1"], "b": ["2 2"], "c": ["3 3"]})
    assert corpus.main(["--output", str(path)]) == 0
    assert corpus.main(["--check", "--output", str(path)]) == 0
    path.write_text(json.dumps({"a": ["1 0"], "b": ["2 2"], "old": ["3 3"]}))
    capsys.readouterr()
    assert corpus.main(["--check", "--output", str(path)]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[:3] == ["no longer made: old", "new: c", "differs: a"]
