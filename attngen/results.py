"""Results of an attention call beside its output; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionAux:
    """By-products of one call.

    lse: log-sum-exp of the scores, natural log, sink included, −∞ for a row that sees
        nothing; float32 (float64 where Q is float64), [b, h_q, s_q], or [h_q, total_q]
        where Q is `thd`. None where it was not asked for.
    max_logit: the largest final score of each head, same dtype, [h_q], −∞ where nothing is
        visible; sinks and padding do not count. None unless it was asked for.
    rng_state: int64 [2], (seed, offset) that rebuilds the dropout mask; None where the call
        neither got nor drew one.
    amax_s, amax_o: float32 [1], what the next scales of S and O are made from: the largest
        weight e^(S − m) before its scale (1, or 0 where no query sees a key) and the largest
        magnitude of the output before its scale. None unless they were asked for.
    """

    lse: Tensor | None = None
    max_logit: Tensor | None = None
    rng_state: Tensor | None = None
    amax_s: Tensor | None = None
    amax_o: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AttentionGradients:
    """Gradients of one call, each in its operand's shape and dtype, None of what it has not.

    dq, dk, dv: of packed operands the first that holds them alone; dbias, dsink: of those tensors.
    """

    dq: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None
    dbias: Tensor | None = None
