"""Variants of arithmetic: one call with scores, sinks and maxima, held to float64 both ways.

Output, LSE and the gradients of q, k and v follow oracle.py, oracle_fp8.py and gradients.py.

max_logit. As the LSE: |M - M64| <= 2 e_torch + 1e-4 max(1, |M64|), in 8 bits plus what tensor cores
may be off in a score.

Gradient of the sink, -sum w D with w = exp(sink - LSE): D = rowsum(dO O) - dLSE is made of an
output that the kernel rounds, which with what the weights' rounding does to it is eps of each
|dO O|, eps the spacing of the dtype's numbers at 1; w has the LSE's error, 1e-4 of max(1, |LSE|)
and as much again. Hence, summed over the head's rows,
    |G - G64| <= sum w (eps sum |dO O| + 2e-4 max(1, |LSE|) |D|).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec, reference
from attngen.fragments import features
from attngen.spec import layouts
from attngen.spec.attention_spec import SHORT_HEAD_DIM
from attngen.spec.problem import Problem
from attngen.spec.resolve import resolve

from . import cases, gradients, oracle, oracle_fp8
from .cases import Case
from .cases_fp8 import Fp8Case


@dataclass(frozen=True)
class Variant:
    """One call. alibi: whose slopes, `default` or own, [h] or [b, h]; softcap: its bound;
    num_splits: parts of the keys."""

    case: Case
    alibi: str = ""
    softmax: str = "vanilla"
    softcap: float = 0.0
    max_logit: bool = False
    deterministic: bool = False
    num_splits: int | None = None

    def __str__(self) -> str:
        softmax = self.softmax * (self.softmax != "vanilla")
        words = (
            f"alibi_{self.alibi}" * bool(self.alibi), softmax,
            f"cap{self.softcap:g}" * bool(self.softcap), "max" * self.max_logit,
            "deterministic" * self.deterministic,
            f"splits{self.num_splits}" * bool(self.num_splits),
        )  # fmt: skip
        return "-".join((str(self.case), *filter(None, words)))

    @property
    def eight_bit(self) -> bool:
        return isinstance(self.case, Fp8Case)

    @property
    def spec(self) -> AttentionSpec:
        """The forward kernel that serves the call."""
        return dataclasses.replace(
            self.case.spec,
            alibi=bool(self.alibi),
            softmax=self.softmax,
            softcap=self.softcap > 0,
            return_max_logit=self.max_logit,
            decode=bool(self.num_splits),
        )

    @property
    def backward(self) -> Problem:
        """The problem that its backward solves."""
        (forward,) = resolve(dataclasses.replace(self.spec, decode=False), features.scan())
        return forward.backward(self.deterministic)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention`, of the kernels and of the reference."""
        batch, heads, _ = self.case.heads
        asked = score_arguments(self.alibi, self.softcap, self.softmax, batch, heads)
        return {**self.case.arguments, **asked}


def score_arguments(
    alibi: str, softcap: float, softmax: str, batch: int, heads: int
) -> dict[str, Any]:
    """Keyword arguments of `attention` that say what happens to scores, as `Variant` says it."""
    found: dict[str, Any] = {"softcap": softcap, "softmax": softmax}
    slopes = {
        "default": True,
        "h": 0.5 * oracle.randn(heads, dtype=torch.float32, seed=7),  # of both signs
        "bh": 0.5 * oracle.randn(heads, batch, dtype=torch.float32, seed=8).T,
    }
    if alibi:
        found["alibi_slopes"] = slopes[alibi]
    if softmax == "learnable":
        found["sink"] = torch.linspace(-3, 6, heads, device=oracle.DEVICE)
    return found


def check_forward(variant: Variant, seed: int = 0) -> None:
    """Runs the kernel on memory full of NaN and asserts the rule for everything it returns; the one
    for short calls and the other, where there are both."""
    for small in (False, True)[: 1 + (max(variant.case.d, variant.case.d_v) <= SHORT_HEAD_DIM)]:
        with oracle.small_tiles(small):
            _check_forward(variant, seed)


def _check_forward(variant: Variant, seed: int) -> None:
    q, k, v = variant.case.operands(seed)
    arguments = variant.arguments
    more: dict[str, Any] = {"return_amax": True} if variant.eight_bit else {}
    more["num_splits"] = variant.num_splits
    with oracle.nan_filled_allocations(), torch.no_grad():
        out, aux = attngen.attention(
            *(q, k, v), **arguments, **more, return_max_logit=variant.max_logit, backend="cuda",
            return_lse=True,
        )  # fmt: skip
    layout = variant.case.layout
    rule: Any = oracle_fp8 if variant.eight_bit else oracle
    expected = rule.truth(q, k, v, **arguments)
    rule.check(out, aux.lse, expected, layout)
    if variant.eight_bit:
        assert aux.amax_s.item() == 1
    if variant.max_logit:
        check_max_logit(aux.max_logit, q, k, v, arguments, variant.eight_bit)
    else:
        assert aux.max_logit is None


def check_max_logit(
    found: Tensor, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], eight_bit: bool
) -> None:
    """Asserts the rule for the largest scores, of fewer than 2^9 in a product of 8 bits."""
    plain = {n: x for n, x in arguments.items() if n != "out_dtype"}
    if "bias" in plain:  # of q's dtype
        plain["bias"] = plain["bias"].double()
    exact = [x.double() for x in (q, k, v)]
    _, aux64 = reference.attention(*exact, **plain, return_max_logit=True)
    _, aux = reference.attention(q, k, v, **arguments, return_max_logit=True)
    assert aux.max_logit is not None and aux64.max_logit is not None
    truth, seen = aux64.max_logit, aux64.max_logit.isfinite()
    assert found.shape == truth.shape and found.dtype == torch.float32
    assert (found[~seen] == float("-inf")).all()
    torch_error = oracle.largest((aux.max_logit.double() - truth)[seen].abs())
    core = 0.0
    if eight_bit:
        layout = arguments.get("layout", "bshd")
        core = oracle.largest(oracle_fp8.score_error(exact[0], exact[1], {}, layout, None))
    limit = 2 * torch_error + 1e-4 * truth[seen].abs().clamp(min=1) + core
    error = (found.double() - truth)[seen].abs()
    assert (error <= limit).all(), f"max_logit: {error.max():.3e} > {limit.min():.3e}"


def check_backward(variant: Variant, seed: int = 0) -> None:
    """Asserts the rules for the gradients of q, k, v and the sink, LSE's gradient included; by the
    kernels for narrow windows and by the others, where there are both."""
    for narrow in (False, True)[: len(variant.backward.orders())]:
        with oracle.narrow_windows(narrow):
            _check_backward(variant, seed)


def _check_backward(variant: Variant, seed: int) -> None:
    operands = variant.case.operands(seed)
    arguments = variant.arguments
    d_o = oracle.randn(*operands[0].shape[:-1], variant.case.d_v, dtype=operands[0].dtype, seed=91)
    batch, heads, _ = variant.case.heads
    dlse = oracle.randn(batch, heads, variant.case.lengths[0], dtype=torch.float32, seed=92)
    found = run_backward(variant, operands, arguments, d_o, dlse)
    gradients.check(found[:3], (*operands, d_o), dlse, **arguments)
    if variant.softmax == "learnable":
        check_sink_gradient_of(operands, found[3], arguments, d_o, dlse)
    if variant.deterministic:
        again = run_backward(variant, operands, arguments, d_o, dlse)
        assert oracle.same(found, again)


def run_backward(
    variant: Variant, operands: Any, arguments: dict[str, Any], d_o: Tensor, dlse: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and, where there is one, the sink, through autograd."""
    inputs = [x.detach().clone().requires_grad_() for x in operands]
    if "sink" in arguments:
        inputs.append(arguments["sink"].detach().clone().requires_grad_())
        arguments = {**arguments, "sink": inputs[3]}
    out, aux = attngen.attention(
        *inputs[:3], **arguments, return_lse=True, deterministic=variant.deterministic,
        return_max_logit=variant.max_logit, num_splits=variant.num_splits, backend="cuda",
    )  # fmt: skip
    return torch.autograd.grad([out, aux.lse], inputs, [d_o, dlse])


def check_sink_gradient_of(
    operands: Any, found: Tensor, arguments: dict[str, Any], d_o: Tensor, dlse: Tensor
) -> None:
    """Asserts the rule for the gradient of the sink of a call."""
    sink = arguments["sink"].double().requires_grad_()
    plain = {**arguments, "sink": sink}
    out, aux = reference.attention(*(x.double() for x in operands), **plain)
    assert aux.lse is not None
    (wanted,) = torch.autograd.grad([out, aux.lse], [sink], [d_o.double(), dlse.double()])
    truth = oracle.Truth(out.detach(), aux.lse.detach(), 0.0, 0.0)
    check_sink_gradient(found, wanted, truth, arguments, d_o, dlse)


def check_sink_gradient(
    found: Tensor,
    wanted: Tensor,
    truth: oracle.Truth,
    arguments: dict[str, Any],
    d_o: Tensor,
    dlse: Tensor,
) -> None:
    """Asserts the rule for the gradient of the sink. Rows without an LSE belong to no sequence."""
    order = oracle.TO_BHSD[layouts.parse(arguments.get("layout", "bshd")).q_format]
    members = truth.lse.isfinite()
    products = (d_o.double() * truth.out).permute(order)
    weights = torch.exp(arguments["sink"].double()[:, None] - truth.lse)
    errors = torch.finfo(d_o.dtype).eps * products.abs().sum(-1)
    size = truth.lse.abs().clamp(min=1)
    errors = errors + 2e-4 * size * (products.sum(-1) - dlse.double()).abs()
    limit = torch.where(members, weights * errors, 0)
    limit = limit.sum(1) if limit.ndim == 2 else limit.sum((0, 2))
    error = (found.double() - wanted).abs()
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    assert (error <= limit).all(), f"sink: {error.tolist()} > {limit.tolist()}"


def every_kind() -> list[Variant]:
    """Each feature alone, all pairs of them and all together, under every kind of mask."""
    choices: list[dict[str, Any]] = [
        {"alibi": "default"}, {"alibi": "h"}, {"softcap": 30.0}, {"softcap": 1.5},
        {"softmax": "off_by_one"}, {"softmax": "learnable"}, {"max_logit": True},
        {"alibi": "bh", "softcap": 1.5}, {"alibi": "default", "softmax": "learnable"},
        {"softcap": 30.0, "softmax": "off_by_one"}, {"alibi": "h", "max_logit": True},
        {"softcap": 1.5, "softmax": "learnable", "max_logit": True},
        {"alibi": "bh", "softcap": 30.0, "softmax": "learnable", "max_logit": True},
    ]  # fmt: skip
    dims = ((128, 128), (64, 64), (256, 256), (72, 40), (192, 128))
    found = []
    for turn in range(2):
        for number, choice in enumerate(choices):
            at = number + 5 * turn
            kind = cases.KINDS[(number + 2 * turn) % 4]
            dtype = ("bf16", "fp16")[(number + turn) % 3 == 0]
            case = cases._case(5 * at + turn, *dims[(at + turn) % 5], dtype, kind)
            deterministic = number % 3 == turn
            found.append(Variant(case, **choice, deterministic=deterministic))
    return found


def eight_bit() -> list[Variant]:
    """The forward in 8 bits."""
    plain = {"lengths": (200, 333), "heads": (2, 6, 2)}
    return [
        Variant(Fp8Case(128, 128, mask="causal", **plain), alibi="default"),
        Variant(Fp8Case(128, 128, mask="causal", **plain), softcap=30.0, softmax="off_by_one"),
        Variant(Fp8Case(64, 64, **plain), alibi="bh", softcap=1.5, max_logit=True),
        Variant(Fp8Case(256, 256, window=(50, 20), **plain), softmax="learnable", max_logit=True),
        Variant(
            *(Fp8Case(192, 128, mask="causal_bottom_right", window=(60, 0), **plain), "h"),
            softmax="learnable", softcap=2.0, max_logit=True,
        ),
    ]  # fmt: skip
