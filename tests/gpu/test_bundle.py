"""From a program to a server: its launches traced, their kernels bundled, and run out of the bundle
where nothing may be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.device, pytest.mark.timeout(300)]

# Two forwards, one of them with its gradients, against the reference.
PROGRAM = """
import torch
import attngen

torch.manual_seed(0)
q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
q.requires_grad_()
for arguments in ({"mask": "causal"}, {"mask": "causal", "window": (100, 0)}):
    results = []
    for backend in ("cuda", "reference"):
        out = attngen.attention(q, k, v, backend=backend, **arguments)
        results.append(out.detach())
        if "window" not in arguments:
            (grad,) = torch.autograd.grad(out.float().square().sum(), q)
            results.append(grad)
    half = len(results) // 2
    for ours, theirs in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)
print("right")
"""


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "ATTNGEN_BUNDLES"}
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *command],
        cwd="/",
        env={**kept, "PYTHONPATH": python_path, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.wgmma
def test_program_traced_bundled_and_served_without_compiling(tmp_path: Path) -> None:
    trace, bundle = str(tmp_path / "trace.jsonl"), str(tmp_path / "kernels.attn")
    attngen = ["-m", "attngen"]
    traced = run([*attngen, "trace", "-o", trace, "--", sys.executable, "-c", PROGRAM])
    assert traced.returncode == 0 and "3 variants noted" in traced.stderr, traced.stderr
    built = run([*attngen, "bundle", "build", "--from-trace", trace, "-o", bundle])
    assert built.returncode == 0 and "3 variants, 7 kernels" in built.stdout, built.stderr
    server = {"ATTNGEN_DISABLE_JIT": "1", "ATTNGEN_CACHE_DIR": str(tmp_path / "none")}
    served = run(["-c", PROGRAM], ATTNGEN_BUNDLES=bundle, **server)
    assert (served.returncode, served.stdout) == (0, "right\n"), served.stderr
    refused = run(["-c", PROGRAM], **server)
    assert refused.returncode == 1 and "is in no mounted bundle; mounted: none" in refused.stderr
    assert not (tmp_path / "none").exists()
