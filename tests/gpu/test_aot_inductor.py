"""Packages of AOTInductor, each in a process of its own: one that dies takes no test along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import cases

pytestmark = [pytest.mark.gpu, pytest.mark.device]
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


def package(what: str, folder: Path) -> None:
    """Compile, load and run a package; a failure shows how far its process came, and its stack."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", MODEL, str(folder / "layer.pt2"), what],
        capture_output=True, text=True, timeout=400, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def test_package_of_torch_alone_runs_on_this_machine(tmp_path):
    package("torch alone", tmp_path)


@pytest.mark.xfail(reason="the process dies of signal 11 (H200, torch 2.11): not understood yet")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_package_runs_and_gives_what_its_model_does(dtype, tmp_path):
    package(dtype, tmp_path)
