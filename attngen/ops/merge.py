"""Merging: one attention over all keys, from attentions over parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SpecError
from ..layouts import parse

# Where the LSE's axes, [b, h, s] or [h, t], lie in the output's.
_AXES = {"bshd": (0, 2, 1), "sbhd": (2, 0, 1), "bhsd": (0, 1, 2), "thd": (1, 0)}


def merge_states(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    layout: str = "bshd",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and LSE of attention over all keys, from those over parts of them: of the GPUs of
    a context-parallel group, or of a prefix that sequences share.

    outs: what `attention` returned for each part, in `layout`, [b, s_q, h_q, d_v] by default;
    lses: their `aux.lse`, [b, h_q, s_q], of packed tokens [h_q, t]. With
    `out_dtype=torch.float32` parts are rounded once, in the end. A sink belongs to one part alone.
    The output has the dtype of the first, or out_dtype; a row that sees no key in any part is 0,
    with an LSE of −∞. Differentiable as the parts are; PyTorch's own operations, on any device.

    Raises: SpecError where parts do not fit each other or the layout.
    """
    axes = _AXES[parse(layout).q_format]
    if reasons := _violations(outs, lses, layout, axes):
        raise SpecError(reasons)
    parts = torch.stack([*lses])
    # Of rows that see nothing anywhere −∞ − −∞ and the gradient of log 0 would be NaN.
    most = parts.detach().amax(0)
    empty = most == -torch.inf
    weights = (parts - most.masked_fill(empty, 0)).exp()
    total = weights.sum(0).masked_fill(empty, 1)
    weights = weights / total
    lse = (most + total.log()).masked_fill(empty, -torch.inf)
    merged = torch.zeros_like(outs[0], dtype=lse.dtype)
    for out, weight in zip(outs, weights, strict=True):
        merged = merged + out * weight.permute(axes).unsqueeze(-1)
    return merged.to(out_dtype or outs[0].dtype), lse


def _violations(
    outs: Sequence[Tensor], lses: Sequence[Tensor], layout: str, axes: tuple[int, ...]
) -> list[str]:
    if not outs or len(outs) != len(lses):
        return [f"as many outs as lses, and at least one; got {len(outs)} and {len(lses)}"]
    first = outs[0]
    shapes = [tuple(x.shape) for x in (*outs, *lses)]
    if first.ndim != len(axes) + 1:
        return [f"outs of layout {layout!r} have {len(axes) + 1} axes; got {list(first.shape)}"]
    rows = tuple(first.shape[axes.index(axis)] for axis in range(len(axes)))
    if shapes != [shapes[0]] * len(outs) + [rows] * len(lses):
        return [
            f"outs need the shape of the first, {list(first.shape)}, and lses {list(rows)}; got "
            f"{[list(shape) for shape in shapes]}"
        ]
    return []
