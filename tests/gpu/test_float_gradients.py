"""Gradients in float32, as parts of sums need them: those of 16 bits before they are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
import attngen.frontends.pytorch.backward  # noqa: F401  # defines the operation
from attngen import AttentionSpec, SpecError
from attngen.call import kept_ds

from . import gradients, oracle

pytestmark = pytest.mark.gpu
ENDS = (0, 60, 60, 150)
# Head dims, and what the call says. Sums are of one order, so that bits can be compared.
CASES = [
    ((128, 128), {"mask": "causal"}),
    ((64, 40), {"mask": "causal", "dropout_p": 0.2}),
    ((192, 128), {"mask": "causal"}),
    ((100, 52), {}),  # which threads copy
    ((264, 72), {"mask": "causal", "dropout_p": 0.2}),  # whose columns two CTAs share
    ((300, 77), {}),
    ((128, 128), {"layout": "thd", "mask": "causal"}),
]
KERNELS = [
    AttentionSpec(
        head_dim=d, head_dim_v=d_v, mask=given.get("mask", "none"), grad_dtype=dtype,
        layout=given.get("layout", "bshd"), dropout="dropout_p" in given, deterministic=True,
        directions=("bwd",),
    )
    for (d, d_v), given in CASES
    for dtype in (None, "fp32")
]  # fmt: skip


def operands(dims: tuple[int, int], given: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and d_o, and the arguments of the call: lengths of packed tokens, of which ten are of
    no sequence."""
    (d, d_v), more = dims, {}
    sizes = (160, 2) if given.get("layout") == "thd" else (1, 150, 2)
    if given.get("layout") == "thd":
        ends = torch.tensor(ENDS, dtype=torch.int32, device=oracle.DEVICE)
        more = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    if "dropout_p" in given:
        more = {"rng_state": torch.tensor((5, 6), device=oracle.DEVICE)}
    dtype = torch.bfloat16
    made = [oracle.randn(*sizes, n, dtype=dtype, seed=k) for k, n in enumerate((d, d, d_v, d_v))]
    return made, {**given, **more}


def found(tensors: list[Tensor], arguments: dict[str, Any], **more: Any) -> list[Tensor]:
    """dq, dk and dv, by the operation."""
    q, k, v, d_o = tensors
    out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    window = dict(zip(("window_left", "window_right"), arguments.pop("window", ()), strict=False))
    with oracle.nan_filled_allocations():
        made = torch.ops.attngen.backward(
            d_o, None, q, k, v, out, aux.lse, **arguments, **window, **more
        )
    return [*made[:3]]


@pytest.mark.parametrize(("dims", "given"), CASES, ids=str)
def test_float_gradients_are_the_sums_that_others_round(dims, given, monkeypatch):
    monkeypatch.setattr(kept_ds, "MOST_BYTES", 0)  # of dS in memory sums are others
    tensors, arguments = operands(dims, given)
    narrow = found(tensors, {**arguments}, deterministic=True)
    wide = found(tensors, {**arguments}, deterministic=True, out_dtype="float32")
    for rounded, exact in zip(narrow, wide, strict=True):
        assert exact.dtype == torch.float32 and not exact.isnan().any()
        assert torch.equal(exact.to(rounded.dtype), rounded)
        assert not torch.equal(exact, rounded.float())


def test_float_gradients_under_a_window_are_right():
    tensors, _ = operands((64, 64), {})
    made = found(tensors, {"window": (20, 5)}, out_dtype="float32")
    gradients.check([x.to(torch.bfloat16) for x in made], tensors, None, window=(20, 5))


def test_other_dtypes_of_gradients_are_refused():
    tensors, _ = operands((64, 64), {})
    with pytest.raises(SpecError, match="float32"):
        found(tensors, {}, out_dtype="float16")
