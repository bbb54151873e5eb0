"""Traces: what launches of several traces, threads and processes leave, and what is read back."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from types import SimpleNamespace

import pytest

import attngen
from attngen.errors import AttngenError
from attngen.runtime import launch, tracing
from attngen.runtime.load import LoadedKernel
from attngen.spec.problem import Variant
from tests.support.cache_kit import ARCH, KERNEL, PROBLEM, start_python


def variant(head_dim: int) -> Variant:
    return dataclasses.replace(PROBLEM, head_dim_qk=head_dim), ARCH


def use(head_dim: int) -> None:
    """A launch, as far as a machine without a driver can go."""
    kernel = LoadedKernel(0, KERNEL, 0, 1, variant(head_dim))
    prepared = SimpleNamespace(loaded=kernel, paired=True, configs=None)
    with pytest.raises(AttributeError):  # of None: the launch ends here
        launch.relaunch(prepared, launch.Parameters(Struct(""), [], 0), 0)  # type: ignore[arg-type]


# Launches of 20 problems by each of four threads, as a program under `attngen trace` makes them.
PROGRAM = """
import sys, threading
from tests.unit.runtime.test_tracing import use
def work():
    for head_dim in range(8, 168, 8):
        use(head_dim)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_trace_notes_each_variant_once_in_the_order_of_use() -> None:
    use(8)
    with attngen.trace() as trace:
        for head_dim in (64, 32, 64, 64):
            use(head_dim)
    use(16)
    assert [*trace.variants] == [variant(64), variant(32)]
    assert tracing.recorders == ()


def test_traces_inside_each_other_and_left_in_any_order_note_their_own() -> None:
    first, second = attngen.trace(), attngen.trace()
    one = first.__enter__()
    use(8)
    two = second.__enter__()
    use(16)
    first.__exit__(None, None, None)
    use(24)
    second.__exit__(None, None, None)
    assert [*one.variants] == [variant(8), variant(16)]
    assert [*two.variants] == [variant(16), variant(24)]


def test_trace_left_by_an_error_is_off() -> None:
    with pytest.raises(ZeroDivisionError), attngen.trace():
        raise ZeroDivisionError
    assert tracing.recorders == ()


def test_trace_notes_launches_of_all_threads() -> None:
    with attngen.trace() as trace:
        threads = [threading.Thread(target=use, args=(8 * n,)) for n in range(1, 21)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(trace.variants) == {variant(8 * n) for n in range(1, 21)}


def test_save_of_nothing_makes_a_file_that_a_build_can_read(tmp_path: Path) -> None:
    with attngen.trace() as trace:
        pass
    trace.save(tmp_path / "trace")
    assert tracing.read(tmp_path / "trace") == []


def test_save_adds_to_a_file_and_read_has_each_once(tmp_path: Path) -> None:
    with attngen.trace() as trace:
        use(8)
        use(16)
    trace.save(tmp_path / "trace")
    trace.save(tmp_path / "trace")
    assert len((tmp_path / "trace").read_text().splitlines()) == 4
    assert tracing.read(tmp_path / "trace") == [variant(8), variant(16)]


@pytest.mark.timeout(60)
def test_variable_lets_processes_and_threads_share_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    monkeypatch.setenv(tracing.VARIABLE, str(path))
    processes = [start_python(PROGRAM) for _ in range(6)]
    assert [(p.communicate()[1], p.returncode) for p in processes] == [("", 0)] * 6
    assert set(tracing.read(path)) == {variant(n) for n in range(8, 168, 8)}


@pytest.mark.timeout(60)
def test_variable_works_in_a_forked_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os
from tests.unit.runtime.test_tracing import use
use(8)
if os.fork() == 0:
    use(8); use(16); os._exit(0)
os.wait()
use(24)
"""
    monkeypatch.setenv(tracing.VARIABLE, str(tmp_path / "trace"))
    process = start_python(code)
    assert process.communicate()[1] == "" and process.returncode == 0
    assert tracing.read(tmp_path / "trace") == [variant(8), variant(16), variant(24)]
    assert len((tmp_path / "trace").read_text().splitlines()) == 3


def test_note_in_a_file_that_cannot_be_written_raises_each_time(tmp_path: Path) -> None:
    trace = tracing.Trace(tmp_path / "absent" / "trace")
    for _ in range(2):
        with pytest.raises(OSError, match="absent"):
            trace.note(variant(8))
    assert trace.variants == {}


@pytest.mark.timeout(60)
def test_note_on_a_full_disk_names_the_file_and_leaves_no_half_line(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from struct import Struct
from attngen.runtime import tracing
from tests.unit.runtime.test_tracing import variant
trace = tracing.Trace(Path(sys.argv[1]))
trace.note(variant(24))
room = trace.path.stat().st_size + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
for n in (8, 16):
    try:
        trace.note(variant(n))
    except OSError as error:
        print(type(error).__name__, error.filename == sys.argv[1])
print(len(trace.variants))
"""
    process = start_python(code, tmp_path / "trace")
    out, err = process.communicate()
    assert out.split() == ["OSError", "True", "OSError", "True", "1"], err
    assert tracing.read(tmp_path / "trace") == [variant(24)]


@pytest.mark.parametrize("content", [b"PK\3\4 a checkpoint", b"{}\n", b"notes\n", b"\n"])
def test_nothing_is_added_to_a_file_that_is_no_trace(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(OSError, match="is no trace, and nothing is added to it"):
        tracing.Trace(path).note(variant(8))
    for variants in ({}, {variant(8): None}):
        with pytest.raises(OSError, match="is no trace, and nothing is added to it"):
            tracing.Trace(variants=variants).save(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_read_what_is_no_file_is_refused_at_once(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "trace")
    with pytest.raises(AttngenError, match="not a regular file|Is a directory"):
        tracing.read(tmp_path / "trace")


def test_read_names_every_line_that_is_no_variant(tmp_path: Path) -> None:
    good = json.dumps({"arch": ARCH, "problem": dataclasses.asdict(PROBLEM)})
    bad = ["", "{}", "[]", "null", '{"arch": "x", "problem": {}}', good[:-9], "[" * 99_999]
    (tmp_path / "trace").write_text("\n".join([good, *bad, good]))
    with pytest.raises(AttngenError) as caught:
        tracing.read(tmp_path / "trace")
    assert len(caught.value.reasons) == len(bad)
    for number, reason in enumerate(caught.value.reasons, 2):
        assert f"line {number}:" in reason


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_read_file_that_is_none_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "trace").write_bytes(content)
    with pytest.raises(AttngenError, match=str(tmp_path / "trace")):
        tracing.read(tmp_path / "trace")
