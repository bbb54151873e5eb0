"""Gradients of learned operands, made of what the kernels of a backward left."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.dropout import keep_scale
from ...call.fp8_scales import KEPT_SCALES
from ...call.learned_sums import DIGITS, LEAST_EXPONENT
from ...call.prepare.backward import PreparedBackward
from ...reference.fp8_backward import chosen_scale_s
from . import bias, sinks


class Results(NamedTuple):
    """Results of a backward's launches: given, its tensors by their names; made, its outputs by
    theirs, zeros where nothing was launched; workspace, None where there is none."""

    prepared: PreparedBackward
    given: Mapping[str, Tensor]
    made: Mapping[str, Tensor]
    workspace: Tensor | None


def _of_sink(left: Results) -> Tensor:
    """The gradient of the sink, float32 [h_q]."""
    prepared, given = left.prepared, left.given
    if prepared.rows is None:
        return _of_unseen(given["sink"], given["lse"], given.get("dlse"))
    assert left.workspace is not None  # it holds the rows
    dropped = prepared.arguments.dropout_p
    if given["q"].element_size() == 1:
        # D is relative to the factor of weights that dropout keeps, and the LSE has it.
        found = sinks.gradient(given["sink"], prepared.rows, left.workspace, 1.0)
        return found.div_(_unit_of_weights(left))
    d_unit = (keep_scale(dropped) or 1.0) if dropped > 0 else 1.0  # D is relative to it
    return sinks.gradient(given["sink"], prepared.rows, left.workspace, d_unit)


def _of_unseen(sink: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient of a sink where no query sees a key: each LSE is its head's, but for rows of no
    sequence."""
    if dlse is None:
        return sink.new_zeros(sink.shape)
    return dlse.masked_fill(lse == -math.inf, 0).sum(1 if dlse.ndim == 2 else (0, 2))


def _unit_of_weights(left: Results) -> Tensor | float:
    """By what kernels multiply weights to store them, which is in the LSE that they leave."""
    scale_s = left.given.get("scale_s")
    if scale_s is not None:
        return scale_s.clamp(*KEPT_SCALES)
    return chosen_scale_s(left.given["q"].dtype, left.prepared.arguments.dropout_p)


def _of_bias(left: Results) -> Tensor:
    """The gradient of the bias, in its shape and dtype."""
    assert left.prepared.dbias is not None  # where it is wanted
    return bias.finished(left.prepared.dbias, left.made["dbias"], left.given["bias"].dtype)


def _of_learned(left: Results) -> Tensor:
    """The gradients of all that a score learns, float32 [n]."""
    made = left.made["dlearned"]
    if made.ndim == 1:
        return made
    digits, unknown = made[:, :DIGITS], made[:, DIGITS]
    units = [2.0 ** (LEAST_EXPONENT + 24 * place) for place in range(DIGITS)]
    total = torch.zeros_like(unknown, dtype=torch.float64)
    for place, unit in enumerate(units):  # in this order, whatever sums do
        total.add_(digits[:, place], alpha=unit)
    return total.masked_fill_(unknown != 0, math.nan).float()


GRADIENTS: dict[str, Callable[[Results], Tensor]] = {
    "dsink": _of_sink,
    "dbias": _of_bias,
    "dlearned": _of_learned,
}
"""The function of each gradient of a learned operand, by its name."""
