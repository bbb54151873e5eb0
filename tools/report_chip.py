"""Check and time the kernels on the GPU of this machine, and write what came of it to one file.

    python tools/report_chip.py -o my-gpu.json

For chips on which no kernel has been run yet (docs/guide/gpus.md): in a checkout, with torch,
pytest and what compiles (`pip install '.[compile]'`). It runs the tests of kernels by products of
warps against float64, and times both directions beside PyTorch's own, and decodes; all take ten
minutes at most, or what --limit says: a part that has not ended when its share of that is over is
stopped, and what it has found until then counts. What a part does not need is left to the next
ones. The file says which chip and versions these were, what failed with its message, and the
figures. It is written after each part, and where the run is interrupted or told to end, with what
there is by then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from attngen.bench.machine import describe_machine  # noqa: E402  # a checkout not installed, too
from attngen.io.values import to_data  # noqa: E402
from attngen.targets.target import names, of_capability  # noqa: E402
from tools import gpu_suite  # noqa: E402
from tools.gpu_results import ReportError, summarise_junit  # noqa: E402

SCHEMA = 2
SUBJECTS = ("sync", "sync_backward", "backward_tiles", "decode", "fp8", "learned", "wide")
TESTS = tuple(f"tests/gpu/test_mma_{name}.py" for name in SUBJECTS)
CASES = "b4-s4k-*,b1-s16k-*"
GRADIENTS = "b4-s4k-*"  # whose check in float64 takes little memory, too: 20 GB at 16k
DECODES = "b16-*-p64,b1-*-kv64k-p64"  # that fit small memories, too
SHARES = {"tests": 0.57, "speed": 0.17, "speed_of_gradients": 0.17, "speed_of_decode": 0.09}
LIMIT = 580.0  # seconds of all; a part that is stopped has some more for its report
MOST_PROCESSES = 8  # that share the tests
LINES = 4  # of what a command has printed, where it failed
INTERRUPTED = 130  # the status of a step that was, as shells have it
MOMENT = 5.0  # seconds in which commands end that a terminal has interrupted, too
PROCESS_BYTES = 3 << 30  # of the GPU's memory, for each of them


def missing() -> str | None:
    """Why there is nothing to check on this machine; None where there is."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA device, and PyTorch sees none; `python -m attngen doctor` says more"
    major, minor = torch.cuda.get_device_capability()
    if of_capability((major, minor)) is None:
        return f"no kernels for compute capability {major}.{minor}; there are: {', '.join(names())}"
    return None


def processes() -> int:
    """How many processes share the tests: as many as there are cores and memory for."""
    import torch

    memory = int(torch.cuda.get_device_properties(0).total_memory)
    return max(1, min(MOST_PROCESSES, os.cpu_count() or 1, memory // PROCESS_BYTES))


def deadlines(began: float, limit: float) -> dict[str, float]:
    """When each step is stopped, in the seconds of `began`."""
    parts = accumulate(SHARES.values())
    return {name: began + limit * part for name, part in zip(SHARES, parts, strict=True)}


def commands(folder: Path, parts: int) -> dict[str, list[list[str]]]:
    """Commands to run side by side, by the names of steps; reports are left in the folder.

    parts: processes that share the tests.
    """
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    bench = [sys.executable, "-m", "attngen", "bench"]
    options = ["--peers", "sdpa", "--json"]
    gradients = str(folder / "speed_of_gradients.json")
    decodes = ["--cases", DECODES, "--peers", "cudnn", "--json"]
    return {
        "tests": [
            [*pytest, *TESTS, f"--shard={i}/{parts}", f"--junit-xml={folder / f'tests-{i}.xml'}"]
            for i in range(1, parts + 1)
        ],
        "speed": [[*bench, "fwd", "--cases", CASES, *options, str(folder / "speed.json")]],
        "speed_of_gradients": [[*bench, "bwd", "--cases", GRADIENTS, *options, gradients]],
        "speed_of_decode": [[*bench, "decode", *decodes, str(folder / "speed_of_decode.json")]],
    }


def run_step(name: str, parts: Sequence[Sequence[str]], logs: Path, deadline: float) -> int:
    """Run the commands of a step, no longer than its deadline; what they print is in `logs`.

    Returns the largest status of them, INTERRUPTED where this process is while they run.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[:1]
    running = []
    try:
        for number, command in enumerate(parts, 1):
            running.append(gpu_suite.start(command, gpu, logs / f"{name}-{number}.txt"))
        gpu_suite.finish(running, deadline)
    except KeyboardInterrupt:
        gpu_suite.finish(running, time.monotonic() + MOMENT)
        return INTERRUPTED
    for number, part in enumerate(running, 1):
        if part.returncode:
            print("\n".join((logs / f"{name}-{number}.txt").read_text().splitlines()[-LINES:]))
    return max(int(abs(part.returncode)) for part in running)


def collect(folder: Path, exits: dict[str, int]) -> dict[str, Any]:
    """The report of what has run. exits: the status of each step. Where a step left nothing, its
    part says why."""
    found: dict[str, Any] = {"schema": SCHEMA, "machine": to_data(describe_machine())}
    found["exit"] = exits
    reports = [x for x in sorted(folder.glob("tests-*.xml")) if "<testcase" in x.read_text()]
    try:
        found["tests"] = summarise_junit(*reports) if reports else {"error": "no report of tests"}
    except ReportError as error:
        found["tests"] = {"error": str(error)}
    for name in ("speed", "speed_of_gradients", "speed_of_decode"):
        try:
            found[name] = json.loads((folder / f"{name}.json").read_text())
        except (OSError, ValueError) as error:
            found[name] = {"error": f"no figures: {type(error).__name__}"}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a test failed, or nothing was timed; exits with 2 where nothing can be checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, required=True, help="file")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of all; default: 580")
    options = parser.parse_args(arguments)
    if why := missing():
        parser.error(why)
    if not (folder := options.output.absolute().parent).is_dir():
        parser.error(f"--output: there is no directory {folder}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exits: dict[str, int] = {}
        seconds: dict[str, float] = {}
        ends = deadlines(time.monotonic(), options.limit)
        for step, parts in commands(folder, processes()).items():
            began = time.monotonic()
            print(f"{step}: at most {max(0.0, ends[step] - began):.0f} s …", flush=True)
            exits[step] = run_step(step, parts, folder, ends[step])
            seconds[step] = round(time.monotonic() - began, 1)
            report = {**collect(folder, exits), "seconds": seconds}
            options.output.write_text(json.dumps(report, indent=1) + "\n")
            if exits[step] == INTERRUPTED:
                print(f"interrupted in {step}")
                break
    print(f"{options.output}: please send it with an issue")
    return int(any(exits.values()))


if __name__ == "__main__":
    sys.exit(main())
