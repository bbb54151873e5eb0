"""Files that users name: written whole or not at all, never over others', and read at once."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attngen.bench import report as bench_report
from attngen.errors import BundleError, PlanError, SpecError
from attngen.io import files
from attngen.kernels import tuned
from attngen.runtime.tracing import Trace
from attngen.ship import wheel as bundle_wheel
from attngen.ship import writer as bundle_write
from attngen.ship.bundle import Bundle
from attngen.spec.attention_spec import load_specs
from tests.support.bundle_kit import cubin_of, make_program, write
from tests.support.cache_kit import ARCH, PROBLEM, ROOT, start_python
from tests.support.kill_kit import killed_at_each_line

pytestmark = pytest.mark.timeout(120)
A = make_program(64, "a")


def is_ours(path: Path) -> bool:
    return path.read_bytes().startswith(b"ours")


def put(path: Path, data: bytes = b"ours, new") -> None:
    with files.replacing(path, is_ours, "note") as file:
        file.write(data)


# ---- replacing and creating


def test_replacing_ours_and_empty_files_alone(tmp_path: Path) -> None:
    for name, content in (("ours", b"ours, old"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        put(tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"ours, new"
    (tmp_path / "other").write_bytes(b"precious")
    with pytest.raises(OSError, match=r"other is no note, and is not replaced by one: name"):
        put(tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == b"precious"
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(OSError, match="is no file, is no note"):
            put(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 5


def test_replacing_spares_what_came_while_the_file_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(OSError, match="is no note"), files.replacing(path, is_ours, "note") as file:
        file.write(b"ours")
        path.write_bytes(b"precious")
    assert path.read_bytes() == b"precious" and list(tmp_path.iterdir()) == [path]


def test_creating_never_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    for links in (True, False):  # which some file systems lack
        if not links:
            monkeypatch.setattr(os, "link", refuse)
        path = tmp_path / f"x{links}"
        with files.creating(path) as file:
            file.write(b"new")
        with pytest.raises(FileExistsError), files.creating(path):
            pass
        late = tmp_path / f"late{links}"
        with pytest.raises(FileExistsError) as caught, files.creating(late) as file:
            late.write_bytes(b"precious")
        assert caught.value.filename == str(late)
        assert (path.read_bytes(), late.read_bytes()) == (b"new", b"precious")
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("writer", [put, lambda path: _create(path)])
def test_writer_that_fails_names_the_file_and_leaves_nothing(
    writer: Callable[[Path], None], tmp_path: Path
) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            writer(tmp_path / "x")
        except OSError as error:
            code = 0 if error.filename == str(tmp_path / "x") else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []


def _create(path: Path) -> None:
    with files.creating(path) as file:
        file.write(b"new")


@pytest.mark.slow
def test_what_killed_writers_left_goes_with_the_next_write(tmp_path: Path) -> None:
    path, left = tmp_path / "x", 0
    other = tmp_path / f".y.{'0' * 32}"
    other.write_text("of another file's writer")
    for _ in killed_at_each_line(lambda: put(path)):
        left += len(list(tmp_path.glob(".x.*")))
        put(path)
        assert sorted(tmp_path.iterdir()) == [other, path]
    assert left


LIVING = """
import sys, time
from pathlib import Path
from attngen.io import files
with files.replacing(Path(sys.argv[1])) as file:
    file.write(b"ours, slow")
    print("writing", flush=True)
    sys.stdin.readline()
"""


def test_what_a_living_writer_has_aside_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    process = subprocess.Popen(
        [sys.executable, "-c", LIVING, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    (aside,) = tmp_path.iterdir()
    os.utime(aside, (0, 0))
    put(path)
    assert aside.exists() and path.read_bytes() == b"ours, new"
    process.communicate("go\n")
    assert process.returncode == 0 and path.read_bytes() == b"ours, slow"


# ---- whatever writes a file where users say


def foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"weights")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "checkpoint": foreign_zip,
    "text": lambda path: path.write_text("notes\n"),
    "json": lambda path: path.write_text('{"schema": "mine"}'),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
}
WHEEL = "acme-1.0-py3-none-any.whl"


def write_wheel(path: Path) -> None:
    bundle = Bundle(write(path.parent / "source" / "x.attn", A))
    made = bundle_wheel.make_wheel(bundle, "acme", "1.0", path.parent)
    assert made == path


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "bundle": ("x.attn", lambda path: bundle_write.write(path, [A], cubin_of)),
    "merged bundle": (
        "x.attn",
        lambda path: bundle_write.merge(path, [Bundle(write(path.parent / "source" / "x", A))]),
    ),
    "wheel": (WHEEL, write_wheel),
    "trace": ("x.jsonl", lambda path: Trace(variants={(PROBLEM, ARCH): None}).save(path)),
    "tuned plans": ("x.json", lambda path: tuned.write(path, "NVIDIA H200", [])),
    "report": ("x.json", lambda path: bench_report.write('{"schema": 1, "machine": {}}', path)),
}


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("writer", WRITERS)
def test_writer_replaces_nothing_of_others(writer: str, foreign: str, tmp_path: Path) -> None:
    name, write_to = WRITERS[writer]
    path = tmp_path / name
    FOREIGN[foreign](path)
    before = path.read_bytes() if path.is_file() else None
    if (writer, foreign) == ("trace", "pipe"):
        pytest.skip("whoever reads it may want the lines")
    with pytest.raises((OSError, PlanError)) as caught:
        write_to(path)
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert {each.name for each in tmp_path.iterdir()} <= {name, "source"}


@pytest.mark.parametrize("writer", WRITERS)
def test_writer_replaces_or_goes_on_with_its_own(writer: str, tmp_path: Path) -> None:
    name, write_to = WRITERS[writer]
    write_to(tmp_path / name)
    first = (tmp_path / name).read_bytes()
    write_to(tmp_path / name)
    assert (tmp_path / name).read_bytes()[: len(first)] == first


def test_bundle_of_another_version_or_damaged_may_be_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "x.attn", A)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"damaged" + whole):
        path.write_bytes(data)
        write(path, A)
        assert path.read_bytes() == whole


def run_attngen(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attngen", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.slow
def test_render_replaces_its_own_sources_alone(tmp_path: Path) -> None:
    spec = tmp_path / "a.toml"
    spec.write_text("[[kernel]]\nhead_dim = 64\n")
    done = run_attngen("render", spec, "-o", tmp_path / "out")
    sources = sorted((tmp_path / "out").iterdir())
    assert done.returncode == 0 and sources, done.stderr
    assert run_attngen("render", spec, "-o", tmp_path / "out").returncode == 0
    sources[0].write_text("// mine\n")
    done = run_attngen("render", spec, "-o", tmp_path / "out")
    assert done.returncode == 1 and f"{sources[0]} is no source rendered by attngen" in done.stderr
    assert sources[0].read_text() == "// mine\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_plot_replaces_its_own_figures_alone(tmp_path: Path, ending: str) -> None:
    plot = pytest.importorskip("attngen.bench.plot")
    from tests.unit.bench.test_bench import ROWS, make_report

    path = tmp_path / f"x.{ending}"
    for _ in range(2):
        plot.save(make_report(*ROWS), path)
    path.write_bytes(b"\x89PNG somebody's figure")
    with pytest.raises(OSError, match="is no figure of attngen's"):
        plot.save(make_report(*ROWS), path)


# ---- readers

READERS: dict[str, Callable[[Path], object]] = {
    "bundle": Bundle,
    "specs": load_specs,
    "tuned plans": tuned.read,
    "report": bench_report.read,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_reader_of_a_pipe_or_device_refuses_at_once(
    make: Callable[[Path], object], reader: str, tmp_path: Path
) -> None:
    make(tmp_path / "x")
    with pytest.raises((BundleError, SpecError, PlanError, OSError), match="not a regular file"):
        READERS[reader](tmp_path / "x")


def test_reader_of_a_file_that_is_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)  # of holes: read as a whole it ends the process
    for reader in ("specs", "tuned plans", "report"):
        with pytest.raises((SpecError, PlanError, OSError), match=r"more than \d+ bytes"):
            READERS[reader](tmp_path / "x")


def test_specs_on_a_full_disk_leave_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    output = tmp_path / "specs.toml"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_attngen("specs", "gemma3", "-o", output, preexec_fn=fill, env=environment)
    assert done.returncode == 1 and str(output) in done.stderr and not list(tmp_path.iterdir())
    assert run_attngen("specs", "gemma3", "-o", output).returncode == 0
    again = run_attngen("specs", "gemma3", "-o", output)
    assert again.returncode == 1 and "is there, and is not replaced" in again.stderr


def test_trace_of_a_program_goes_to_no_file_of_others(tmp_path: Path) -> None:
    """Nor by the variable that names it, in a program that nobody watches."""
    path = tmp_path / "model.pt"
    foreign_zip(path)
    before = path.read_bytes()
    code = (
        "from attngen.runtime import tracing\nfrom tests.unit.runtime.test_tracing import variant\n"
    )
    process = start_python(
        f"import os; os.environ['ATTNGEN_TRACE'] = {str(path)!r}\n{code}tracing.note(variant(8))"
    )
    _, err = process.communicate()
    assert process.returncode and "is no trace" in err and path.read_bytes() == before
    done = run_attngen("trace", "-o", path, "--", "true")
    assert done.returncode == 1 and json.dumps(str(path))[1:-1] in done.stderr
    assert path.read_bytes() == before
