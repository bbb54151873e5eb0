"""Packages of AOTInductor, each in a process of its own: one that dies takes no test along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import cases

pytestmark = [pytest.mark.gpu, pytest.mark.device]
STAGES = ["exports", "compiles", "loads", "runs"]
KERNELS = [cases.spec(64, mask="causal")]
MODEL = """
import sys, torch, attngen
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(256, 768)
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).unbind(2)
        if sys.argv[2] == "torch alone":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).flatten(-2)
        dtype = torch.float32 if sys.argv[2] == "float32" else None
        return attngen.attention(q, k, v, mask="causal", out_dtype=dtype).flatten(-2)
torch.manual_seed(0)
layer = Layer().cuda().bfloat16()
inputs = [torch.randn(2, s, 256, device="cuda", dtype=torch.bfloat16) for s in (128, 300, 1)]
with torch.no_grad():
    sizes = {1: torch.export.Dim("s", min=1, max=4096)}
    print("exports", file=sys.stderr)
    program = torch.export.export(layer, (inputs[0],), dynamic_shapes=(sizes,))
    print("compiles", file=sys.stderr)
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    print("loads", file=sys.stderr)
    package = torch._inductor.aoti_load_package(sys.argv[1])
    for x in inputs:
        print("runs", len(x[0]), file=sys.stderr)
        torch.testing.assert_close(package(x), layer(x), atol=2e-2, rtol=2e-2)
torch.cuda.synchronize()
"""


def failure_of_package(what: str, folder: Path) -> list[str]:
    """Compile, load and run a package; lines that its process wrote before it failed, else none."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", MODEL, str(folder / "layer.pt2"), what],
        capture_output=True, text=True, timeout=400, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    return [*done.stderr.splitlines(), f"exit status {done.returncode}"] if done.returncode else []


@pytest.fixture(scope="module")
def torch_packages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where a package of torch's own operations does not run: no test of attngen's could."""
    lines = failure_of_package("torch alone", tmp_path_factory.mktemp("alone"))
    if lines:
        reached = [line for line in lines if line.split()[:1] and line.split()[0] in STAGES][-1]
        pytest.skip(f"torch {torch.__version__}: a package of its own operations dies: {reached}")


@pytest.mark.usefixtures("torch_packages")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_package_runs_and_gives_what_its_model_does(dtype, tmp_path):
    lines = failure_of_package(dtype, tmp_path)
    assert not lines, "\n".join(lines)[-4000:]
