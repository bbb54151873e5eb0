"""Merging: one attention over all keys, from attentions over parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import SpecError
from ...spec.layouts import Format, parse, size


def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    layout: str = "bshd",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and LSE of attention over all keys, from those over parts of them: of the GPUs of
    a context-parallel group, or of a prefix that sequences share.

    outs: what `attention` returned for each part, in `layout`, [b, s_q, h_q, d_v] by default;
    lses: their `aux.lse`, [b, h_q, s_q], of packed tokens [h_q, t]; parts may be stacked. With
    `out_dtype=torch.float32` parts are rounded once, in the end. A sink belongs to one part alone.
    The output has the dtype of the first, or out_dtype; a row that sees no key in any part is 0,
    with an LSE of −∞. Differentiable as the parts are; PyTorch's own operations, on any device.

    Raises: SpecError where parts do not fit each other or the layout.
    """
    fmt = parse(layout).q_format
    lse_axes = "ht" if fmt == "thd" else "bhs"
    if reasons := _violations(outs, lses, fmt, lse_axes):
        raise SpecError(reasons)
    first, *_ = outs
    order = [lse_axes.index(axis) for axis in fmt[:-1]]  # of the output's axes
    parts = torch.stack([*lses])
    # Of rows that see nothing anywhere −∞ − −∞ and the gradient of log 0 would be NaN.
    most = parts.detach().amax(0)
    empty = most == -torch.inf
    weights = (parts - most.masked_fill(empty, 0)).exp()
    total = weights.sum(0).masked_fill(empty, 1)
    lse = (most + total.log()).masked_fill(empty, -torch.inf)
    shares = (weights / total).unsqueeze(-1)
    weighed = (x * share.permute(*order, -1) for x, share in zip(outs, shares, strict=True))
    merged = sum(weighed, lse.new_zeros(()))
    return merged.to(out_dtype or first.dtype), lse


def _violations(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    fmt: Format,
    lse_axes: str,
) -> list[str]:
    if len(outs) == 0 or len(outs) != len(lses):
        return [f"as many outs as lses, and at least one; got {len(outs)} and {len(lses)}"]
    first, *_ = outs
    shapes = [tuple(x.shape) for x in (*outs, *lses)]
    if first.ndim != len(fmt):
        return [f"outs in {fmt} have {len(fmt)} axes; got {list(first.shape)}"]
    rows = tuple(size(first.shape, fmt, axis) for axis in lse_axes)
    if shapes != [tuple(first.shape)] * len(outs) + [rows] * len(lses):
        return [
            f"outs need the shape of the first, {list(first.shape)}, and lses {list(rows)}; got "
            f"{[list(shape) for shape in shapes]}"
        ]
    return []
