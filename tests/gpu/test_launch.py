"""Launching: nothing compiled twice, a process without a compiler, CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attngen
from attngen.runtime import load

from . import cases, oracle
from .conftest import has_other_kernels
from .oracle import run, same

pytestmark = [pytest.mark.gpu, pytest.mark.device]
KERNELS = cases.core_specs(64, 128, 256)
ROOT = Path(__file__).resolve().parents[2]


def test_launch_new_shapes_compile_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)
    compiled = []
    original = attngen.compiler.compile.run_nvrtc

    def counted(*args, **kwargs):
        compiled.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr("attngen.compiler.compile.run_nvrtc", counted)
    for number in range(20):  # a kernel that no other test uses
        heads = cases.HEADS[number % len(cases.HEADS)]
        layout = cases.LAYOUTS[number % 3]
        lengths = (70 + 37 * number, 500 - 23 * number)  # fewer go to kernels that split keys
        q, k, v = oracle.operands(*heads, *lengths, 24, 88, torch.float16, layout)
        mask = "causal_bottom_right" if number % 2 else "causal"
        window = (number, number)
        oracle.check_call(q, k, v, layout=layout, mask=mask, window=window, softmax_scale=0.1)
        # One kernel for short calls, which Hopper alone has, and one for others, each called with
        # every shape.
        wanted = 2 - has_other_kernels()
        assert len(compiled) == wanted, f"{len(compiled)} compiles after {number + 1} shapes"


def test_compile_beside_a_driver_has_the_compilers_report_each_time():
    """NVRTC has a cache of its own there, which keeps no report."""
    text = "__global__ void f(float* x) { *x = 1; }"
    for _ in range(2):
        assert "Used" in attngen.compiler.compile.run_nvrtc(text, "f.cu", "sm_90a").log


def test_load_cubin_whose_parameters_are_not_those_described_is_refused():
    """The driver says itself how many bytes it would read from a launch."""
    (built, *_) = attngen.build(attngen.AttentionSpec(head_dim=64), "sm_90a")
    device = torch.cuda.current_device()
    torch.zeros(1, device="cuda")
    kernel = built.binary.kernel
    assert load.load(built.binary, built.cubin, device).kernel == kernel
    for params_bytes in (kernel.params_bytes + 64, 4096):
        changed = replace(kernel, params_bytes=params_bytes)
        with pytest.raises(attngen.LaunchError, match="its cubin takes parameters of"):
            load.load(replace(built.binary, kernel=changed), built.cubin, device)


FRESH_PROCESS = """
import sys
blocked = ("jinja2", "cuda.bindings.nvrtc", "cuda.core")
for name in blocked:
    sys.modules[name] = None  # importing it raises ImportError
import torch, attngen
data = torch.load(sys.argv[1])
tensors = [x.to("cuda") for x in data["operands"]]
out, aux = attngen.attention(*tensors, **data["arguments"], backend="cuda", return_lse=True)
assert torch.equal(out.cpu(), data["out"]), "output differs"
assert torch.equal(aux.lse.cpu(), data["lse"]), "lse differs"
assert all(sys.modules[name] is None for name in blocked)
try:
    attngen.attention(*tensors, mask="none", backend="cuda")
except attngen.CacheError as error:
    assert "ATTNGEN_DISABLE_JIT" in str(error), error
else:
    raise AssertionError("a kernel that is in no cache was compiled")
print("right")
"""


def test_launch_fresh_process_without_compiler_loads_from_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    spec = cases.spec(64, None, "bf16", "causal")
    built = zip(attngen.build(spec, "sm_90a"), attngen.build(spec, "sm_90a"), strict=True)
    for first, second in built:
        assert not first.from_cache and second.from_cache and first.cubin == second.cubin
    tensors = oracle.operands(2, 4, 2, 300, 300, 64)
    out, lse = run(tensors)
    data = {"operands": tensors, "out": out, "lse": lse}
    data = {
        name: [x.cpu() for x in v] if name == "operands" else v.cpu() for name, v in data.items()
    }
    torch.save({**data, "arguments": {"mask": "causal"}}, tmp_path / "data.pt")
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "data.pt")],
        env={**os.environ, "ATTNGEN_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr


def capture(tensors, mask):
    """A CUDA graph of one call, and the tensors it writes."""
    return oracle.capture(lambda: run(tensors, mask))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_launch_graph_replay_follows_changed_inputs(mask):
    tensors = oracle.operands(3, 8, 2, 1100, 1100, 128)
    graph, results = capture(tensors, mask)
    for number in range(10):
        for tensor, fresh in zip(
            tensors, oracle.operands(3, 8, 2, 1100, 1100, 128, seed=number + 1), strict=True
        ):
            tensor.copy_(fresh)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert same(results, run(tensors, mask))
    oracle.check(*results, oracle.truth(*tensors, mask=mask))


def test_launch_graph_of_several_calls_replays_right(workloads):
    """Counters of calls in one graph come from one pool; each must be zero when its call starts."""
    for tensors, _ in workloads:
        run(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run(tensors) for tensors, _ in workloads for _ in range(2)]
    for _ in range(3):
        graph.replay()
        for pair, (_, wanted) in enumerate(workloads):
            assert same(results[2 * pair], wanted) and same(results[2 * pair + 1], wanted)


def test_launch_graph_replays_beside_eager_launches_on_another_stream(workloads):
    (tensors, wanted), (others, others_wanted) = workloads[3], workloads[5]
    graph, results = capture(tensors, "causal")
    replaying, eager = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        with torch.cuda.stream(replaying):
            graph.replay()
            found.append([x.clone() for x in results])
        with torch.cuda.stream(eager):
            found.append(run(others))
    torch.cuda.synchronize()
    assert all(same(found[n], wanted) for n in range(0, 20, 2))
    assert all(same(found[n], others_wanted) for n in range(1, 20, 2))


def test_launch_two_graphs_replay_on_two_streams_at_once(workloads):
    picked = [workloads[3], workloads[6]]
    graphs = [capture(tensors, "causal") for tensors, _ in picked]
    streams = [torch.cuda.Stream() for _ in picked]
    torch.cuda.synchronize()
    for _ in range(10):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, results), (_, wanted) in zip(graphs, picked, strict=True):
        assert same(results, wanted)


def test_launch_graph_captured_on_two_branches_replays_right(workloads):
    """Two calls that a graph may run at the same time must not share a counter."""
    picked = [workloads[3], workloads[6]]
    branch = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        branch.wait_stream(main)
        first = run(picked[0][0])
        with torch.cuda.stream(branch):
            second = run(picked[1][0])
        main.wait_stream(branch)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert same(first, picked[0][1]) and same(second, picked[1][1])
