"""Check and time the kernels on the GPU of this machine, and write what came of it to one file.

    python tools/report_chip.py -o my-gpu.json

For chips on which no kernel has been run yet (docs/guide/gpus.md): in a checkout, with torch,
pytest and what compiles (`pip install '.[compile]'`). It runs the tests of kernels by products of
warps against float64, and times both directions beside PyTorch's own, and decodes; all take some
minutes. The file says which chip and versions these were, what failed with its message, and the
figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from attngen.bench.machine import describe_machine  # noqa: E402  # a checkout not installed, too
from attngen.io.values import to_data  # noqa: E402
from attngen.targets.target import names, of_capability  # noqa: E402
from tools.gpu_results import ReportError, summarise_junit  # noqa: E402

SCHEMA = 1
SUBJECTS = ("sync", "sync_backward", "backward_tiles", "decode", "fp8")
TESTS = tuple(f"tests/gpu/test_mma_{name}.py" for name in SUBJECTS)
CASES = "b4-s4k-*,b1-s16k-*"
GRADIENTS = "b4-s4k-*"  # whose check in float64 takes little memory, too: 20 GB at 16k
DECODES = "b16-*-p64,b1-*-kv64k-p64"  # that fit small memories, too


def missing() -> str | None:
    """Why there is nothing to check on this machine; None where there is."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA device, and PyTorch sees none; `python -m attngen doctor` says more"
    major, minor = torch.cuda.get_device_capability()
    if of_capability((major, minor)) is None:
        return f"no kernels for compute capability {major}.{minor}; there are: {', '.join(names())}"
    return None


def commands(folder: Path) -> dict[str, list[str]]:
    """Commands to run, by their names; reports are left in the folder."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    bench = ["-m", "attngen", "bench"]
    options = ["--peers", "sdpa", "--json"]
    gradients = str(folder / "speed_of_gradients.json")
    return {
        "tests": [*pytest, *TESTS, f"--junit-xml={folder / 'tests.xml'}"],
        "speed": [*bench, "fwd", "--cases", CASES, *options, str(folder / "speed.json")],
        "speed_of_gradients": [*bench, "bwd", "--cases", GRADIENTS, *options, gradients],
        "speed_of_decode": [
            *(*bench, "decode", "--cases", DECODES, "--peers", "cudnn", "--json"),
            str(folder / "speed_of_decode.json"),
        ],
    }


def collect(folder: Path, exits: dict[str, int]) -> dict[str, Any]:
    """The report of what has run. exits: the status of each command. Where a command left nothing,
    its part says why."""
    found: dict[str, Any] = {"schema": SCHEMA, "machine": to_data(describe_machine())}
    found["exit"] = exits
    try:
        found["tests"] = summarise_junit(folder / "tests.xml")
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
    options = parser.parse_args(arguments)
    if why := missing():
        parser.error(why)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exits = {}
        for step, command in commands(folder).items():
            print(f"{step}: python {' '.join(command[:4])} …", flush=True)
            exits[step] = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
        report = collect(folder, exits)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{options.output}: please send it with an issue")
    return int(any(exits.values()))


if __name__ == "__main__":
    sys.exit(main())
