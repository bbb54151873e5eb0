"""Scores of any finite size: outputs, LSEs and gradients where scores leave float32 no room.

Models mask by adding the lowest finite number of a dtype, whole rows too, or some -1e9. Operands
are small whole numbers and the scale a power of two, so that products are exact and every score is
rounded once, by kernels and reference alike: then the reference in float32 has their very scores,
and 16-bit results lie within a few roundings of it, however large scores are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import reference

from . import oracle, varlen
from .cases import DTYPES

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Large:
    """A call whose bias, `entries` of it, is large. heads: batch, query heads, key heads. packed:
    tokens of sequences follow each other, of the last one fewer."""

    d: int
    entries: str
    kind: str = "post_scale"
    lengths: tuple[int, int] = (150, 200)
    heads: tuple[int, int, int] = (2, 2, 1)
    dtype: str = "bf16"
    shape: tuple[bool, bool, bool] = (False, True, True)  # of batch, heads, queries: not broadcast
    more: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

    def __str__(self) -> str:
        more = "-".join(f"{name}_{value}" for name, value in self.more.items())
        head = f"{self.entries}-{self.kind}-d{self.d}-{self.dtype}" + "-packed" * self.packed
        return f"{head}-{more}".rstrip("-")

    __hash__ = object.__hash__

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the call, both directions."""
        softmax, mask = self.more.get("softmax", "vanilla"), self.more.get("mask", "none")
        return attngen.AttentionSpec(
            self.d, dtype=self.dtype, bias=self.kind, directions=("fwd", "bwd"), softmax=softmax,
            layout="thd" if self.packed else "bshd", mask=mask.removesuffix("_bottom_right"),
            window="window" in self.more, alibi="alibi_slopes" in self.more,
            softcap="softcap" in self.more, dropout="dropout_p" in self.more,
        )  # fmt: skip

    def ends(self) -> tuple[list[int], list[int]]:
        """Where packed queries and keys of each sequence end, 0 first."""
        batch = self.heads[0]
        ends = ([n * b for b in range(batch)] + [n * batch - n // 3] for n in self.lengths)
        of_q, of_kv = ends
        return of_q, of_kv

    def operands(self) -> list[Tensor]:
        """q, k and v, of whole numbers up to 2; v anything."""
        batch, heads_q, heads_kv = self.heads
        s_q, s_kv = self.lengths
        dtype = DTYPES[self.dtype]
        sizes: tuple[tuple[int, ...], ...] = ((batch, s_q, heads_q), (batch, s_kv, heads_kv))
        if self.packed:
            tokens_q, tokens_kv = (ends[-1] for ends in self.ends())
            sizes = (tokens_q, heads_q), (tokens_kv, heads_kv)
        q, k = (oracle.randn(*size, self.d, dtype=torch.float32, seed=n).round().clamp(-2, 2)
                for n, size in enumerate(sizes))  # fmt: skip
        v = oracle.randn(*sizes[1], self.d, dtype=torch.float32, seed=3)
        return [x.to(dtype) for x in (q, k, v)]

    def bias(self) -> Tensor:
        """The bias, [1 or b, 1 or h_q, 1 or s_q, s_kv], where tokens are packed of the longest."""
        full = (self.heads[0], self.heads[1], self.lengths[0])
        sizes = [n if kept else 1 for n, kept in zip(full, self.shape, strict=True)]
        return ENTRIES[self.entries]((*sizes, self.lengths[1]), DTYPES[self.dtype])

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention`, the bias apart."""
        found = {"bias_type": self.kind, "softmax_scale": 0.125, **self.more}
        if self.packed:
            names = ("cu_seqlens_q", "cu_seqlens_kv")
            found |= dict(zip(names, map(varlen.int32, self.ends()), strict=True), layout="thd")
        if "dropout_p" in found:
            found["rng_state"] = torch.tensor([3, 9], device=oracle.DEVICE)
        if found.get("softmax") == "learnable":
            found["sink"] = torch.linspace(-3, 6, self.heads[1], device=oracle.DEVICE)
        return found


def _uniform(sizes: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)).to(oracle.DEVICE)


def _masked(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros, the lowest number for a third of the entries and for every third row."""
    bias = torch.zeros(sizes, device=oracle.DEVICE, dtype=dtype)
    bias[_uniform(sizes, 1) < 0.3] = torch.finfo(dtype).min
    bias[:, :, ::3] = torch.finfo(dtype).min
    return bias


def _levels(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows that have some of the numbers by which models mask, none of which hides another."""
    lowest = torch.finfo(dtype).min
    numbers = torch.tensor([-1e4, -3e4, lowest / 2, lowest, lowest], device=oracle.DEVICE)
    least = (_uniform((*sizes[:3], 1), 2) * 5).long()
    picked = torch.maximum((_uniform(sizes, 3) * 5).long(), least)
    return numbers.to(dtype)[picked]


def _offsets(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small numbers, in rows raised or lowered by powers of two from 2^8 to the largest."""
    most = math.log2(torch.finfo(dtype).max)
    powers = 8 + (_uniform((*sizes[:3], 1), 4) * (most - 8)).floor()
    sign = torch.where(_uniform((*sizes[:3], 1), 5) < 0.5, -1.0, 1.0)
    return (sign * torch.exp2(powers) + (_uniform(sizes, 6) * 8).floor()).to(dtype)


def _any_bits(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any finite numbers."""
    bits = (_uniform(sizes, 7) * 65536).int() - 32768
    bias = bits.to(torch.int16).view(dtype)
    return torch.where(bias.isfinite(), bias, torch.zeros_like(bias))


ENTRIES = {"masked": _masked, "levels": _levels, "offsets": _offsets, "bits": _any_bits}

CASES = [
    *(Large(64, entries, kind) for entries in ENTRIES for kind in ("post_scale", "pre_scale")),
    *(Large(128, entries, dtype=dtype) for entries in ENTRIES for dtype in ("bf16", "fp16")),
    Large(256, "masked"),
    Large(256, "bits", "pre_scale"),
    Large(192, "levels"),
    Large(128, "masked", more={"mask": "causal"}, lengths=(200, 200)),
    Large(128, "bits", more={"mask": "causal_bottom_right"}),
    Large(64, "masked", more={"mask": "causal", "window": (40, 0)}, lengths=(200, 200)),
    Large(128, "levels", more={"window": (30, 20)}),
    Large(128, "masked", more={"alibi_slopes": True}),
    Large(128, "offsets", more={"softmax": "learnable"}),
    Large(64, "masked", more={"softmax": "off_by_one"}),
    Large(128, "masked", more={"softcap": 16.0}),
    Large(128, "masked", "pre_scale", more={"softcap": 16.0}),
    Large(64, "masked", more={"dropout_p": 0.25}),
    Large(128, "masked", shape=(True, False, True)),
    Large(64, "levels", shape=(False, False, False)),
    Large(40, "masked"),
    Large(64, "levels", packed=True),
    Large(128, "masked", packed=True, more={"mask": "causal"}),
    Large(128, "offsets", "pre_scale", packed=True),
]  # fmt: skip
EACH = pytest.mark.parametrize("case", CASES, ids=str)


def expected_of(case: Large, d_o: Tensor) -> tuple[Tensor, ...]:
    """The output, LSE and gradients of q, k, v and the bias, of the reference in float32."""
    inputs = [x.detach().float().requires_grad_() for x in (*case.operands(), case.bias())]
    *operands, bias = inputs
    out, aux = reference.attention(*operands, bias=bias, **case.arguments())
    found = torch.autograd.grad(out, inputs, d_o.float())
    assert aux.lse is not None
    return out.detach(), aux.lse.detach(), *found


def check_close(name: str, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Asserts that a 16-bit result is within some roundings of its weights and itself; beside those
    of a row that sees one key alone, whose gradients are 0, is what these leave of it."""
    assert not found.isnan().any(), f"{name}: {int(found.isnan().sum())} NaN"
    error = oracle.largest((found.float() - wanted).abs())
    limit = 6 * torch.finfo(dtype).eps * oracle.largest(wanted.abs()) + 1e-4
    assert error <= limit, f"{name}: error {error:.3e} > {limit:.3e}"


def check(case: Large, deterministic: bool, device: torch.device | None = None) -> None:
    """Asserts that outputs, LSEs and gradients by a device's kernels are the reference's."""
    dtype = DTYPES[case.dtype]
    d_o = oracle.randn(*case.operands()[0].shape, dtype=dtype, seed=5)
    wanted_out, wanted_lse, *wanted = expected_of(case, d_o)
    device = device or d_o.device
    inputs = [x.to(device).requires_grad_() for x in (*case.operands(), case.bias())]
    given = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in case.arguments().items()}
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            *inputs[:3], bias=inputs[3], **given, deterministic=deterministic, return_lse=True,
            backend="cuda",
        )  # fmt: skip
        found = torch.autograd.grad(out, inputs, d_o.to(device))
    check_close("out", out.detach().to(d_o.device), wanted_out, dtype)
    check_lse(aux.lse.detach().to(d_o.device), wanted_lse)
    for name, gradient, truth in zip(("dq", "dk", "dv", "dbias"), found, wanted, strict=True):
        if name == "dbias" and case.shape == (False, False, False):
            continue  # one column of keys has none
        check_close(name, gradient.to(d_o.device), truth, dtype)


def check_lse(found: Tensor, wanted: Tensor) -> None:
    """Asserts that LSEs are the reference's to some roundings."""
    error = (found - wanted).abs() / wanted.abs().clamp(min=1)
    assert (found.isfinite() == wanted.isfinite()).all()
    assert oracle.largest(error.nan_to_num(0)) <= 1e-5


@EACH
def test_forward_of_large_biases_is_the_references(case: Large) -> None:
    dtype = DTYPES[case.dtype]
    d_o = oracle.randn(*case.operands()[0].shape, dtype=dtype, seed=5)
    out, lse, *_ = expected_of(case, d_o)
    with oracle.nan_filled_allocations(), torch.no_grad():
        found, aux = attngen.attention(
            *case.operands(), bias=case.bias(), **case.arguments(), return_lse=True, backend="cuda"
        )
    check_close("out", found, out, dtype)
    check_lse(aux.lse, lse)


@EACH
@pytest.mark.parametrize("deterministic", [False, True], ids=["any", "ordered"])
def test_gradients_of_large_biases_are_the_references(case: Large, deterministic: bool) -> None:
    check(case, deterministic)
