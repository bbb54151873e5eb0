"""Times what a program of JAX waits for besides the kernels, on one GPU, and writes it as JSON.

    python tools/latency_jax.py -o docs/results/latency-jax.json

Microseconds a call of small attention, in a program of 32 calls and in one of a single call, by
attngen and by `jax.nn.dot_product_attention(implementation="cudnn")`: with XLA's own choice of
what goes into command buffers, with nothing in them, and beside a thread that computes in Python:
there a program's dispatch waits for the interpreter, which hides behind programs that are long, and
which a program without attention shows as well, of one kernel that XLA makes of 32 products.
Every figure is a median over programs; each setting has a process of its own, and each row is
printed as it is measured. cuDNN, whose programs compile for long, is left out without --peers.
A last process times larger calls beside those of PyTorch: the same kernels, by who launches them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CALLS, PROGRAMS, BATCH = 32, 10, 5
ENOUGH = 2.0  # seconds, after which a row takes the programs that it has
OFTEN = 1e-4  # seconds
SHORT, LONG = (1, 256, 2, 128), (8, 4096, 16, 128)
ELEMENTWISE = "elementwise"
SETTINGS = {
    "default": "",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
}
KERNELS = "kernels"
CASES = {"d128": (4, 4096, 16, 4, 128, 128), "d64": (4, 4096, 16, 4, 64, 64)}
ROUNDS, BUDGET_MS = 7, 30.0


def attentions() -> dict[str, Callable[..., Any]]:
    """Causal attention of q, k and v by name, and what is none."""
    import jax

    from attngen.frontends.jax import attention

    return {
        ELEMENTWISE: lambda q, k, v: q * k + v,
        "attngen": lambda q, k, v: attention(q, k, v, mask="causal", backend="cuda"),
        "cudnn": lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        ),
    }


def program_of(attend: Callable[..., Any], calls: int) -> Callable[[Any], Any]:
    """A program of so many calls, each of the output before it."""
    import jax

    def run(x: Any) -> Any:
        first = x
        for _ in range(calls):
            x = attend(x, first, first)
        return x

    return jax.jit(run)


def time_of(program: Callable[[Any], Any], x: Any, calls: int) -> float:
    """Microseconds a call, of programs that are dispatched one behind another."""
    for _ in range(3):
        program(x).block_until_ready()
    found: list[float] = []
    end = time.perf_counter() + ENOUGH
    while len(found) < PROGRAMS and not (found and time.perf_counter() > end):
        start = time.perf_counter()
        for _ in range(BATCH):
            last = program(x)
        last.block_until_ready()
        found.append((time.perf_counter() - start) / BATCH / calls * 1e6)
    return statistics.median(found)


def computing(ended: threading.Event) -> None:
    """Keep the interpreter busy."""
    while not ended.is_set():
        sum(range(1000))


def beside_a_thread(
    program: Callable[[Any], Any], x: Any, calls: int, interval: float | None = None
) -> float:
    """Microseconds a call while another thread keeps the interpreter busy. interval: seconds after
    which it gives it up, Python's own by default."""
    ended, before = threading.Event(), sys.getswitchinterval()
    thread = threading.Thread(target=computing, args=(ended,))
    thread.start()
    sys.setswitchinterval(before if interval is None else interval)
    try:
        return time_of(program, x, calls)
    finally:
        sys.setswitchinterval(before)
        ended.set()
        thread.join()


def measure(peers: bool) -> Iterator[tuple[str, float]]:
    """Rows by what was called, how often, and beside what; microseconds, in this process."""
    import jax
    import jax.numpy as jnp

    for name, attend in attentions().items():
        if name == "cudnn" and not peers:
            continue
        sizes = ((CALLS, SHORT), (CALLS, LONG), (1, SHORT))
        for calls, shape in sizes[:1] if name == ELEMENTWISE else sizes:
            x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
            program = program_of(attend, calls)
            start = time.perf_counter()
            program(x).block_until_ready()
            print(f"{name}: first run {time.perf_counter() - start:.1f} s", file=sys.stderr)
            row = f"{name}, {calls}{' long' if shape is LONG else ''}"
            yield row, time_of(program, x, calls)
            if calls == CALLS:
                yield f"{row}, beside a thread", beside_a_thread(program, x, calls)
            if calls == CALLS and shape is SHORT:
                us = beside_a_thread(program, x, calls, OFTEN)
                yield f"{row}, beside a thread that gives way every 0.1 ms", us


def measure_kernels() -> Iterator[tuple[str, dict[str, float]]]:
    """Milliseconds of a call by case, direction and who launches it, on the GPU, interleaved."""
    from attngen.bench import in_jax, peers, run, timing
    from attngen.bench.workloads import Case

    in_jax.require_cuda()
    who = {"jax": in_jax.ours(), "pytorch": peers.ours()}
    for name, sizes in CASES.items():
        for causal in (True, False):
            case = Case(*sizes, causal=causal)
            operands = run.random_operands(case)
            for direction in ("fwd", "bwd"):
                calls = {each: peer.makers[direction](case, operands) for each, peer in who.items()}
                found = timing.time_interleaved(calls, ROUNDS, BUDGET_MS)
                row = f"{name} {'causal' if causal else 'full'} {direction}"
                yield row, {each: round(ms, 4) for each, ms in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="where the JSON goes; else printed")
    parser.add_argument("--peers", action="store_true", help="cuDNN, too")
    parser.add_argument("--here", choices=["calls", KERNELS], help="measure in this process")
    given = parser.parse_args()
    if given.here:
        rows: Any = measure(given.peers) if given.here == "calls" else measure_kernels()
        for row, figures in rows:
            found = figures if isinstance(figures, dict) else round(figures, 2)
            print(json.dumps({row: found}), flush=True)
        return
    from importlib.metadata import version

    from attngen.bench.machine import describe_machine

    machine = dataclasses.asdict(describe_machine())
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    report: dict[str, Any] = {**machine, **versions, "calls": CALLS, "programs": PROGRAMS, "us": {}}
    for setting, flags in [*SETTINGS.items(), (KERNELS, "")]:
        print(f"{setting}:", file=sys.stderr, flush=True)
        for figures in rows_of(setting, flags, given.peers):
            print(f"  {figures}", file=sys.stderr, flush=True)
            known = report if setting == KERNELS else report["us"]
            known.setdefault("kernel_ms" if setting == KERNELS else setting, {}).update(figures)
            text = json.dumps(report, indent=1)
            if given.output is not None:  # with each row: a run that is ended keeps them
                given.output.write_text(f"{text}\n")
    if given.output is None:
        print(text)


def rows_of(setting: str, flags: str, peers: bool) -> Iterator[dict[str, Any]]:
    """Rows of a process with these flags of XLA, as it measures them.

    Raises: SystemExit where it fails.
    """
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    what = KERNELS if setting == KERNELS else "calls"
    command = [sys.executable, __file__, "--here", what, *["--peers"] * peers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise SystemExit(f"{setting}: ended with {process.returncode}")


if __name__ == "__main__":
    main()
