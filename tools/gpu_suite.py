"""Runs the GPU tests and sanitizers whole, on every GPU and core of the machine, as JSON.

    python tools/gpu_suite.py -o docs/results/gpu-tests.json --logs build/gpu-suite
    python tools/gpu_suite.py --target sm_90 -o docs/results/gpu-tests-mma-sync.json

Kernels of all tests are built first, on all cores. Then processes share the tests, each with a GPU
of its own as its first, and beside them run shards of compute-sanitizer's three tools. Needs
pytest-xdist. Exit status and fields are those of tools/gpu_results.py. Tests that reach the limit
are stopped, and those that ran still count; a sanitizer that is stopped has no summary, which is
an error. With --target a Hopper GPU runs the kernels of other GPUs; what these refuse by name is
skipped, and so are tests of what Hopper's own alone do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attngen.compiler import cutlass  # noqa: E402  # a checkout not installed, too
from attngen.targets import target  # noqa: E402
from tools import gpu_results  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = ("memcheck", "racecheck", "synccheck")
SHARDS = 5  # of each: as many processes as there are of all tests, about
BUILDER_CORES = 4  # of a process that builds kernels
PATIENCE = 20  # seconds that a stopped part has for its report


def gpu_names() -> list[str]:
    """Numbers of the GPUs, as CUDA_VISIBLE_DEVICES names them; none where the driver's tool finds
    none."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number in range(found.stdout.count("GPU "))]


def tests_command(tests: Sequence[str], workers: int, junit: Path) -> list[str]:
    """pytest over the tests, whose kernels are built, spread over processes."""
    spread = ["-n", str(workers), "--dist", "worksteal", "--junit-xml", str(junit)]
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--built", *spread, *tests]


def build_commands(tests: Sequence[str], cores: int) -> Iterator[list[str]]:
    """Processes of pytest that build what the tests launch, and run none: one for some cores, as
    threads of a single one wait for each other to render."""
    parts = -(-cores // BUILDER_CORES)
    for part in range(1, parts + 1):
        share = f"--build-only={part}/{parts}"
        yield [sys.executable, "-m", "pytest", "-q", "-m", "gpu", share, *tests]


def sanitizer_commands(sanitizer: str, logs: Path) -> Iterator[tuple[Path, list[str]]]:
    """Logs and commands of the shards."""
    for tool in SANITIZERS:
        for shard in range(1, SHARDS + 1):
            log = logs / f"{tool}-{shard}.log"
            asked = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
            script = [sys.executable, "tests/gpu/sanitize.py", "--shard", f"{shard}/{SHARDS}"]
            yield log, [sanitizer, *asked, "--log-file", str(log), *script]


def find_sanitizer() -> str:
    """compute-sanitizer on the path, else that of the CUDA toolkit. Raises: SystemExit."""
    found = shutil.which("compute-sanitizer")
    others = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    if not (found or others):
        raise SystemExit("compute-sanitizer is not here; --no-sanitizers leaves it out")
    return found or str(others[-1])


def start(command: Sequence[str], gpus: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """A part of the run, with these GPUs, in this order.

    It hears an interrupt even where this process, in the background of a script, ignores them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path = os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with output.open("wb") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **settings}, stdout=file, stderr=file
        )


def finish(parts: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Waits for the parts until then; those that still run are interrupted, as by Ctrl-C."""
    for part in parts:
        try:
            part.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.send_signal(signal.SIGINT)
    for part in parts:
        try:
            part.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            part.kill()
            part.wait()


def run(options: argparse.Namespace, gpus: Sequence[str]) -> int:
    """The whole run on these GPUs; the exit status of tools/gpu_results.py."""
    logs: Path = options.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    if options.target:
        os.environ[target.VARIABLE] = options.target
    tests = [*options.tests, *([f"--each={options.each}"] if options.each else [])]
    began = time.monotonic()
    deadline = began + options.limit
    builders = enumerate(build_commands(tests, len(os.sched_getaffinity(0))), 1)
    finish([start(each, gpus, logs / f"build-{n}.txt") for n, each in builders], deadline)
    print(f"kernels built after {time.monotonic() - began:.0f} s", flush=True)
    junit = logs / "report.xml"
    command = tests_command(tests, options.workers, junit)
    parts = [start(command, gpus, logs / "tests.txt")]
    found: list[Path] = []
    shards = sanitizer_commands(find_sanitizer(), logs) if options.sanitizers else iter(())
    for number, (log, shard) in enumerate(shards):
        gpu = gpus[number % len(gpus)]
        parts.append(start(shard, [gpu], log.with_suffix(".txt")))
        found.append(log)
    finish(parts, deadline)
    print(f"all ended after {time.monotonic() - began:.0f} s", flush=True)
    output = ["--output", str(options.output)]
    named = ["--sanitizer", *map(str, found)] if found else []
    forced = ["--target", options.target] if options.target else []
    return gpu_results.main(["--junit", str(junit), *named, *forced, *output])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=["tests/gpu"], help="default: all")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="JSON")
    parser.add_argument("--logs", type=Path, default=Path("build/gpu-suite"), metavar="DIR")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4))
    parser.add_argument("--limit", type=float, default=3600, help="seconds of the whole run")
    parser.add_argument("--target", choices=target.names(), help="whose kernels run on this GPU")
    parser.add_argument("--each", type=int, metavar="N", help="sets of parameters of each test")
    parser.add_argument("--no-sanitizers", dest="sanitizers", action="store_false")
    options = parser.parse_args(arguments)
    if not (gpus := gpu_names()):
        parser.error("needs a CUDA device, and nvidia-smi names none")
    if cutlass.version() is None:
        parser.error(f"needs {cutlass.PACKAGE}: kernels of mma.sync compile with its headers")
    return run(options, gpus)


if __name__ == "__main__":
    sys.exit(main())
