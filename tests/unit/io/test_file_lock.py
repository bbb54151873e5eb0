"""Locks that end with their process, whatever it left running, and never follow a link."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from attngen.compiler import cache_lock
from attngen.io import file_lock
from tests.support.cache_kit import start_python

pytestmark = pytest.mark.timeout(60)

# Holds a lock in a thread, forks a child that lives on, and tells the child's number.
FORKER = """
import os, sys, threading, time
from pathlib import Path
from attngen.compiler import cache_lock
held = threading.Event()
def hold():
    with cache_lock.hold(Path(sys.argv[1]), "a"):
        held.set()
        time.sleep(600)
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""
HOLDER = """
import sys, time
from pathlib import Path
from attngen.io import file_lock
lock = file_lock.try_lock(Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
time.sleep(600)
"""


def is_free(path: Path) -> bool:
    lock = file_lock.try_lock(path)
    if lock is not None:
        lock.release()
    return lock is not None


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def check_refused_elsewhere(path: Path) -> None:
    """Another process does not get the lock."""
    process = start_python(HOLDER, path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "refused\n"
    finally:
        kill(process)


def test_lock_of_a_dead_process_is_free_while_its_forked_child_lives(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = start_python(FORKER, path)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert not is_free(path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        start = time.monotonic()
        with cache_lock.hold(path, "b"):
            assert time.monotonic() - start < 1
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        kill(process)


def test_child_that_ends_leaves_its_parents_lock_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = file_lock.try_lock(path)
    assert lock is not None
    child = os.fork()
    if child == 0:
        lock.release()  # what it has inherited of it
        os._exit(2 * is_free(path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child got the lock"
    check_refused_elsewhere(path)
    lock.release()
    assert is_free(path)


def test_threads_and_other_spellings_of_a_path_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    first, found = tmp_path / "lock", list[bool]()
    with file_lock.try_lock(first) or pytest.fail("not free"):
        for path in (first, tmp_path / "link" / "lock"):
            thread = threading.Thread(target=lambda path=path: found.append(is_free(path)))
            thread.start()
            thread.join()
        # What was opened and closed meanwhile has not taken the lock back.
        check_refused_elsewhere(first)
    assert found == [False, False] and is_free(first)


def test_nothing_is_made_or_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "absent").symlink_to(tmp_path / "created")
    (tmp_path / "there").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("precious")
    for name in ("absent", "there"):
        with pytest.raises(OSError) as caught:
            file_lock.try_lock(tmp_path / name)
        assert caught.value.errno == errno.ELOOP
        with cache_lock.hold(tmp_path / name, "a"):  # in the place of the link
            assert not (tmp_path / name).is_symlink() and not is_free(tmp_path / name)
    assert not (tmp_path / "created").exists()
    assert (tmp_path / "victim").read_text() == "precious"


def test_sweep_removes_free_files_alone(tmp_path: Path) -> None:
    mine, another, free = (tmp_path / name for name in ("mine", "another", "free"))
    free.touch()
    process = start_python(HOLDER, another)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with file_lock.try_lock(mine) or pytest.fail("not free"):
            file_lock.sweep(tmp_path.iterdir())
            assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "mine"]
    finally:
        kill(process)
    file_lock.sweep(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_locks_makes_files_that_no_sweeper_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OSError, match="No locks"):
        file_lock.try_lock(tmp_path / "lock")
    descriptors = os.listdir("/proc/self/fd")
    with file_lock.make_locked(tmp_path / "new") or pytest.fail("not made"):
        file_lock.sweep(tmp_path.iterdir())
        assert (tmp_path / "new").exists()
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_waiting_is_told_and_after_ten_seconds_as_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache_lock.WARNING_SECONDS == 10
    monkeypatch.setattr(cache_lock, "WARNING_SECONDS", 0.2)
    monkeypatch.setattr(cache_lock, "TIMEOUT_SECONDS", 0.6)
    path = tmp_path / "lock"
    with (
        file_lock.try_lock(path) or pytest.fail("not free"),
        caplog.at_level(logging.INFO, logger="attngen"),
        cache_lock.hold(path, "kernel"),
    ):
        pass
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING", "WARNING"]
    assert "kernel: waiting for 0 s for another process" in caplog.messages[1]
    assert str(path) in caplog.messages[1] and "going on without" in caplog.messages[2]
