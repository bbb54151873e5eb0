"""Processes that run JAX's programs: with graphs and without, out of exports and the cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.support.paths import ROOT

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the memory
jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = [pytest.mark.gpu, pytest.mark.device]
TOLERANCE = 1.5e-2  # of the largest number
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
ALL_GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE "
    "--xla_gpu_graph_min_graph_size=1"
)


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    """Skips where JAX has no CUDA."""
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("needs a jax with CUDA; jax.devices('cuda') has none")


CALLS = """
import json, os, sys
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax, jax.numpy as jnp
from attngen.jax import attention

q = jax.random.normal(jax.random.key(0), (1, 256, 2, 128), jnp.bfloat16)

@jax.jit
def program(x):
    for _ in range(32):
        x = attention(x, q, q, mask="causal", backend="cuda")
    return x
"""
PROGRAM = f"""{CALLS}
def loss(x):
    return (program(x).astype(jnp.float32) ** 2).sum()

first = program(q).block_until_ready()
for _ in range(3):
    program(q).block_until_ready()
for _ in range(20):
    last = program(q)
last.block_until_ready()
gradients = [jax.grad(loss)(q).astype(jnp.float32) for _ in range(4)]
print(json.dumps({{
    "same": bool(jnp.array_equal(first, last)),
    "gradients": [float(abs(x).max()) for x in gradients],
}}))
if "pending" in sys.argv:
    for _ in range(50):
        program(q)
"""


@pytest.mark.parametrize("flags", [NO_GRAPHS, "", ALL_GRAPHS], ids=["none", "default", "all"])
def test_graphs_replay_what_was_recorded_and_processes_end(flags: str) -> None:
    """With command buffers and without; the interpreter is left while calls are pending."""
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "pending"],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"]
    first, *others = found["gradients"]
    assert first > 0 and all(abs(x - first) <= TOLERANCE * first for x in others)


ENDLESS = f"""{CALLS}
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which processes in the background ignore
program(q).block_until_ready()
print("running", flush=True)
while True:
    x = q
    for _ in range(20):
        x = program(x)
    x.block_until_ready()
"""


@pytest.mark.parametrize("flags", [NO_GRAPHS, ""], ids=["none", "default"])
def test_process_that_is_interrupted_ends(flags: str) -> None:
    """Ctrl-C while kernels are launched, in handlers too, is a KeyboardInterrupt in the end, or
    XLA's error that names it: no crash, and nobody waits for ever."""
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", process.communicate()[1][-2000:]
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said, said[-2000:]
    assert process.returncode in (1, 130, -signal.SIGINT), (process.returncode, said[-2000:])


LOADED = """
import sys
import jax, jax.numpy as jnp
import attngen.jax

with open(sys.argv[1], "rb") as file:
    program = jax.export.deserialize(file.read())
x = jnp.asarray(jax.random.normal(jax.random.key(0), (1, 200, 4, 64)), jnp.bfloat16)
print(float(program.call(x).astype(jnp.float32).sum()))
"""


def test_exported_programs_and_the_cache_serve_other_processes(tmp_path: Any) -> None:
    """A program is exported here, and run in processes of which one finds it compiled."""
    from attngen.jax import attention

    def total(x: Any) -> Any:
        def loss(x: Any) -> Any:
            out = attention(x, x, x, mask="causal", backend="cuda")
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(x)

    x = jnp.asarray(jax.random.normal(jax.random.key(0), (1, 200, 4, 64)), jnp.bfloat16)
    program = jax.jit(total)
    wanted = float(program(x).astype(jnp.float32).sum())
    allowed = [jax.export.DisabledSafetyCheck.custom_call("attngen")]
    exported = jax.export.export(program, platforms=["cuda"], disabled_checks=allowed)(x)
    path = tmp_path / "program"
    path.write_bytes(exported.serialize())
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", LOADED, str(path)],
            capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert abs(float(done.stdout) - wanted) <= TOLERANCE * max(1, abs(wanted))
    assert [*(tmp_path / "cache").iterdir()]
