"""AOTInductor: a package of a model, compiled ahead of time, calls the operations by what its C++
hands over."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.export import Dim, export

import attngen
from attngen.frontends.pytorch import (  # noqa: F401  # which define operations
    backward,
    forward,
    on_reference,
)
from tests.support.autograd_kit import OnReference

NAMES = ("forward", "backward", "reference", "reference_backward")
# Others, dtypes among them, reach an operation as another value in some versions of torch, or not
# at all, and what an operation says of that is lost: the process dies.
CARRIED = ("Tensor", "str", "int", "SymInt", "bool", "float")


@pytest.mark.parametrize("name", NAMES)
def test_operations_take_what_a_package_can_hand_over(name):
    schema = getattr(torch.ops.attngen, name).default._schema
    types = {
        str(argument.type).removeprefix("Optional[").rstrip("]") for argument in schema.arguments
    }
    assert types <= {*CARRIED}
    assert {str(result.type) for result in schema.returns} == {"Tensor"}


class Layer(torch.nn.Module):
    """A call with an argument of every kind."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x, bias, sink, slopes, used):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        out, aux = attngen.attention(
            *(q, k, v), bias=bias, bias_type="pre_scale", sink=sink, softmax="learnable",
            alibi_slopes=slopes, seqused_kv=used, mask="padding_causal_bottom_right",
            window=(20, -1), softcap=3.5, softmax_scale=0.3, max_seqlen_kv=9, return_lse=True,
            out_dtype=torch.float32,
        )  # fmt: skip
        return out, aux.lse


def inputs(batch):
    scored = torch.randn(2, 9, 9).bfloat16(), torch.randn(2), torch.rand(2)
    used = torch.arange(batch, dtype=torch.int32) + 5
    return torch.randn(batch, 9, 32).bfloat16(), *scored, used


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++")
@pytest.mark.parametrize("path", ["kernels", "reference"])
def test_package_gives_what_its_model_does_at_other_sizes(path, monkeypatch, tmp_path):
    stand_in = OnReference(monkeypatch) if path == "kernels" else None
    layer, sizes = Layer().bfloat16(), {0: Dim("batch", min=1, max=9)}
    with torch.no_grad():
        program = export(layer, inputs(2), dynamic_shapes=(sizes, {}, {}, {}, sizes))
        file = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2")
        )
        package = torch._inductor.aoti_load_package(file)
        for batch in (2, 1, 4):
            given = inputs(batch)
            torch.testing.assert_close(package(*given), layer(*given))
    if stand_in:
        assert set(stand_in.names) == {"forward"}
        stand_in.library._destroy()
