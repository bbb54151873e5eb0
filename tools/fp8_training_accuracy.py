"""Measures how far FP8 attention and its gradients are from float64, by the reference on a CPU, and
prints a table.

    python tools/fp8_training_accuracy.py            # two minutes

A row is a way to train: recipes of `attngen.fp8` with gradients in 16 bits, and the backward in
8 bits that `reference.fp8_backward` defines. Each number is a relative root-mean-square error in
per cent, against float64 of the bfloat16 inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attngen  # noqa: E402  # a checkout not installed, too
from attngen import fp8, reference  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = ("out", "dq", "dk", "dv")
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """Standard normal q, k, v and gradient of the output, [1, s, 2, d] in bfloat16.

    outliers: how much larger one number in a thousand is; size: of all of q, k and v.
    """

    name: str
    length: int
    mask: str
    outliers: float = 1.0
    size: float = 1.0
    head_dim: int = 128

    def tensors(self, seed: int) -> Results:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for _ in range(4):
            shape = (1, self.length, 2, self.head_dim)
            x = torch.randn(shape, generator=generator)
            chosen = torch.rand(shape, generator=generator) < 1e-3
            made.append(torch.where(chosen, x * self.outliers, x))
        q, k, v, d_o = made
        return tuple(x.bfloat16() for x in (q * self.size, k * self.size, v * self.size, d_o))


INPUTS = (
    Inputs("512 causal", 512, "causal"),
    Inputs("2048 causal", 2048, "causal"),
    Inputs("2048 full", 2048, "none"),
    Inputs("2048 causal, outliers × 10", 2048, "causal", outliers=10.0),
    Inputs("2048 causal, inputs / 1000", 2048, "causal", size=0.001),
)


def step(attend: Callable[..., Tensor], inputs: Inputs, seed: int, context: object) -> Results:
    """Output and gradients of one step."""
    *operands, d_o = inputs.tensors(seed)
    q, k, v = (x.requires_grad_() for x in operands)
    with context:  # type: ignore[attr-defined]
        out = attend(q, k, v, mask=inputs.mask, backend="reference")
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), d_o))


def exact(inputs: Inputs) -> Results:
    """Output and gradients in float64."""
    *operands, d_o = (x.double() for x in inputs.tensors(1))
    q, k, v = (x.requires_grad_() for x in operands)
    out, _ = reference.attention(q, k, v, mask=inputs.mask)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), d_o))


def delayed(inputs: Inputs, first: int) -> Results:
    """A step of delayed scaling behind one with other numbers, or, with first, the first one of
    scales 1, as where histories begin without a warm-up."""
    layer = fp8.Attention(amax_history_len=4)
    if first:
        layer.scales.scale.fill_(1.0)
    else:
        step(layer, inputs, 2, fp8.autocast(recipe=fp8.DelayedScaling(amax_history_len=4)))
    return step(layer, inputs, 1, fp8.autocast(recipe=fp8.DelayedScaling(amax_history_len=4)))


def in_8_bits(
    inputs: Inputs, dtype: torch.dtype, unit: bool = False, mixed: bool = False
) -> Results:
    """Current scaling with a backward in 8 bits, dO and dS of that dtype, gradients in bfloat16.
    unit: every scale is 1, those of P and dS, too; mixed: P and dS have 16 bits."""
    *operands, d_o = inputs.tensors(1)
    kind = fp8.Quantizer if unit else fp8.CurrentQuantizer
    quantizers = [kind(x) for x in (E4M3, E4M3, E4M3, dtype)]
    stored = [each.store(x) for each, x in zip(quantizers, (*operands, d_o), strict=True)]
    (q, *_), (k, *_), (v, *_), (d_o8, descale_do) = stored
    scales: dict[str, Any] = {f"descale_{n}": s for n, (_, s) in zip("qkv", stored, strict=False)}
    one = torch.ones(1) if unit else None
    scales |= {"scale_s": one, "descale_s": one}
    out, aux = reference.attention(q, k, v, mask=inputs.mask, **scales)
    assert aux.lse is not None  # as the reference always returns it
    given = reference.BackwardOperands(
        d_o=d_o8,
        descale_do=descale_do,
        o=out,
        lse=aux.lse,
        scale_dp=one,
        descale_dp=one,
        mixed=mixed,
    )
    found = reference.fp8_backward(given, q, k, v, mask=inputs.mask, **scales)
    assert found.dk is not None and found.dv is not None  # tensors of their own
    return out, found.dq, found.dk, found.dv


def ways() -> dict[str, Callable[[Inputs], Results]]:
    """Ways to train, by what they are called in the table."""

    def recipe(**more: Any) -> Callable[[Inputs], Results]:
        context = fp8.autocast(recipe=fp8.Float8CurrentScaling(**more))
        return lambda inputs: step(attngen.attention, inputs, 1, context)

    return {
        "bfloat16": lambda inputs: step(attngen.attention, inputs, 1, nullcontext()),
        "current scaling, powers of two": recipe(),
        "current scaling, any scale": recipe(use_power_2_scales=False),
        "delayed scaling, second step": lambda inputs: delayed(inputs, 0),
        "scales 1, a first step without warm-up": lambda inputs: delayed(inputs, 1),
        "backward in 8 bits, HYBRID": lambda inputs: in_8_bits(inputs, E5M2),
        "backward in 8 bits, E4M3": lambda inputs: in_8_bits(inputs, E4M3),
        "backward in 8 bits, HYBRID, scales 1": lambda inputs: in_8_bits(inputs, E5M2, True),
        "mixed backward, HYBRID": lambda inputs: in_8_bits(inputs, E5M2, mixed=True),
        "mixed backward, E4M3": lambda inputs: in_8_bits(inputs, E4M3, mixed=True),
    }


def errors(found: Results, wanted: Results) -> list[float]:
    """Relative root-mean-square errors in per cent."""
    return [
        100 * float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)
    ]


def table(cases: tuple[Inputs, ...]) -> str:
    """Lines of a markdown table, a row a way to train."""
    lines = [f"| | {' | '.join(x.name for x in cases)} |", "|---" * (len(cases) + 1) + "|"]
    wanted = {each.name: exact(each) for each in cases}
    for name, way in ways().items():
        cells = []
        for inputs in cases:
            found = errors(way(inputs), wanted[inputs.name])
            cells.append(" / ".join(f"{x:.1f}" for x in found))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shortest", action="store_true", help="the first inputs alone")
    asked = parser.parse_args()
    print(f"{' / '.join(NAMES)}, relative RMS error in %\n")
    print(table(INPUTS[:1] if asked.shortest else INPUTS))


if __name__ == "__main__":
    main()
