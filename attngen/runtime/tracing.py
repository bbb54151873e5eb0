"""Tracing: which kernels a program launches, so that exactly those can be built beforehand."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import AttngenError
from ..io.files import open_regular, read_regular
from ..io.text import printable, quoted
from ..io.values import from_data, to_data
from ..spec.problem import Problem, Variant

VARIABLE = "ATTNGEN_TRACE"
BYTE_LIMIT = 32 << 20  # some 70,000 variants
LINE_LIMIT = 10_000  # bytes; a variant has 500
_MISTAKE_LIMIT = 200


@dataclass(eq=False)
class Trace:
    """The variants whose kernels were launched while it was on, in the order of their first use.
    A CUDA graph's launches are seen when it is captured, not when it is replayed.

    path: a file to which each is added as a line of JSON when it is first seen; processes may share
    one.
    """

    path: Path | None = None
    variants: dict[Variant, None] = field(default_factory=dict)

    def note(self, variant: Variant) -> None:
        """Raises: OSError where the file cannot be written.

        Two threads may both find a variant new, and write it twice: `read` has each once.
        """
        if variant in self.variants:
            return
        if self.path is not None:
            _append(self.path, variant)
        self.variants[variant] = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Adds the variants to a file that `attngen bundle build --from-trace` takes; it is there
        then, whatever was launched. Raises: OSError, also where another kind of file is there."""
        os.close(_open(Path(path)))
        for variant in self.variants:
            _append(Path(path), variant)


recorders: tuple[Trace, ...] = ()
"""The traces that are on; `launch` asks only whether there are any."""
_lock = threading.Lock()  # of the name above, never held in a launch: a fork leaves it free


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Notes what every thread of this process launches inside the `with` block. The reference
    backend launches nothing, so that a machine without a GPU has nothing to note."""
    global recorders
    found = Trace()
    with _lock:
        recorders = (*recorders, found)
    try:
        yield found
    finally:
        with _lock:
            recorders = tuple(each for each in recorders if each is not found)


def note(variant: Variant) -> None:
    """Tells every trace that is on of a launch."""
    for each in recorders:
        each.note(variant)


def read(path: Path) -> list[Variant]:
    """The variants in a file (`-`: standard input), each once. Raises: as `read_places`."""
    return [*read_places(path)]


def read_places(path: Path) -> dict[Variant, str]:
    """The variants in a file (`-`: standard input), each with the line that has it first, as
    `trace.jsonl, line 3`.

    Raises: AttngenError with every line that is none, and where the file is no trace at all.
    """
    origin = printable(str(path))
    found: dict[Variant, str] = {}
    mistakes: list[str] = []
    try:
        lines = _read_bytes(path).splitlines()
    except OSError as error:
        raise AttngenError(f"{origin}: {error.strerror or error}") from error
    except ValueError as error:
        raise AttngenError(f"{origin}: {error}") from error
    for number, line in enumerate(lines, 1):
        place = f"{origin}, line {number}"
        try:
            found.setdefault(_variant_of(line), place)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            if len(mistakes) == _MISTAKE_LIMIT:
                raise AttngenError([*mistakes, f"{origin}: reading ends here"]) from error
            mistakes.append(f"{place}: not of a trace: {printable(str(reason))}")
    if mistakes:
        raise AttngenError(mistakes)
    return found


def _read_bytes(path: Path) -> bytes:
    """Raises: OSError or ValueError, also where there are more than a trace has."""
    if path != Path("-"):
        return read_regular(path, BYTE_LIMIT)
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    if len(data := sys.stdin.buffer.read(BYTE_LIMIT + 1)) > BYTE_LIMIT:
        raise ValueError(f"more than {BYTE_LIMIT} bytes")
    return data


def _variant_of(line: bytes) -> Variant:
    """The variant of a line. Raises: ValueError, RecursionError."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"more than {LINE_LIMIT} bytes")
    data = json.loads(line.decode())
    if not isinstance(data, dict) or data.keys() != {"arch", "problem"}:
        raise ValueError("expected an object of arch and problem")
    if not isinstance(data["arch"], str):
        raise ValueError(f"arch: expected str, got {quoted(data['arch'])}")
    return from_data(Problem, data["problem"]), data["arch"]


def _append(path: Path, variant: Variant) -> None:
    problem, arch = variant
    line = json.dumps({"arch": arch, "problem": to_data(problem)}, sort_keys=True).encode() + b"\n"
    descriptor = _open(path)
    try:
        # One write, so that processes do not mix their lines.
        if (written := os.write(descriptor, line)) < len(line):
            _take_back(descriptor, written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """The file, made where it is missing, open to add lines at its end.

    Raises: OSError, also where it has bytes already and is no trace.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size and not _is_trace(path):
        os.close(descriptor)
        name = printable(str(path))
        raise OSError(f"{name} is no trace, and nothing is added to it: name another file")
    return descriptor


def _is_trace(path: Path) -> bool:
    """Whether the first line of a file is one of a trace."""
    with open_regular(path) as file:
        line = file.readline(LINE_LIMIT + 1)
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.keys() == {"arch", "problem"}


def _take_back(descriptor: int, count: int) -> None:
    """Removes what was just written, where nothing stands behind it."""
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - count)


if _path := os.environ.get(VARIABLE):
    recorders = (Trace(Path(_path)),)
