"""Operators are defined once in a process, however often their modules are imported, and what was
imported last serves them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attngen.frontends.pytorch.registry import operator
from tests.support.paths import ROOT

BEFORE = """
import importlib, sys, torch, attngen
from attngen.frontends.pytorch import backward, forward, on_reference
q = torch.randn(1, 4, 2, 8)
old = attngen.attention
want = old(q, q, q)
def compiled(attention):
    torch._dynamo.reset()
    return torch.compile(lambda q: attention(q, q, q), backend="aot_eager", fullgraph=True)(q)
def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "attngen"]:
        del sys.modules[name]
"""
AFTER = """
import attngen
from torch._subclasses.fake_tensor import FakeTensorMode
for attention in (attngen.attention, old):  # an old copy may be in use
    torch.testing.assert_close(attention(q, q, q), want)
torch.testing.assert_close(compiled(attngen.attention), want)
leaf = q.clone().requires_grad_()
assert compiled(lambda q, *_: attngen.attention(leaf, q, q)).requires_grad
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert has("attngen::forward", "CUDA") and has("attngen::backward", "CUDA")
with FakeTensorMode():
    fake = torch.empty(1, 4, 2, 8, device="cuda")
    out, lse, *_ = torch.ops.attngen.forward(fake, fake, fake)
    dq, *_ = torch.ops.attngen.backward(out, None, fake, fake, fake, out, lse)
assert out.shape == dq.shape == q.shape
"""
WAYS = {
    "removed and imported": "forget(); importlib.import_module('attngen')",
    "twice": "for _ in range(2): forget(); importlib.import_module('attngen').attention(q, q, q)",
    "operation reloaded": "importlib.reload(sys.modules['attngen.frontends.pytorch.operation'])",
    "forward reloaded": "importlib.reload(sys.modules['attngen.frontends.pytorch.forward'])",
    "reference reloaded": "importlib.reload(sys.modules['attngen.frontends.pytorch.on_reference'])",
    "all reloaded": (
        "for name in [n for n in sys.modules if n.startswith('attngen.')]:"
        " importlib.reload(sys.modules[name])"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_module_imported_again_serves_its_operators(way):
    code = "\n".join([BEFORE, WAYS[way], "import attngen.frontends.pytorch.forward", AFTER])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_newest_implementation_and_schema_serve():
    name = "_of_this_test"
    call = lambda *given: getattr(torch.ops.attngen, name)(*given)  # noqa: E731
    operator(name, "(Tensor x) -> Tensor").impl(name, lambda x: x + 1, "CPU")
    one = torch.ones(())
    assert call(one) == 2
    held = getattr(torch.ops.attngen, name).default
    operator(name, "(Tensor x) -> Tensor").impl(name, lambda x: x + 2, "CPU")
    assert call(one) == 3 and held(one) == 3
    other = operator(name, "(Tensor x, int by) -> Tensor")
    other.impl(name, lambda x, by: x + by, "CPU")
    assert call(one, 4) == 5
