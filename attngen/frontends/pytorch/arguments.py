"""Arguments of the operation that serves a call, and what else is known of a checked call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...call.table import AttentionCall
from ...reference import fp8
from ...spec import layouts
from .autograd import Trained
from .casts import Casts
from .operation import Ready
from .schedule import Ordered
from .signature import Arguments, name_of


@dataclass
class Settled:
    """Facts about calls that were checked and have a kernel: the operation's arguments, the query
    heads that take ALiBi's own slopes, operands that are cast, whether operations take the lengths
    that a call gives, what an order of its sequences depends on and, once launched from here, which
    operands there are and all that a launch needs: for the output, or for all outputs, without
    gradients or with."""

    arguments: Arguments
    default_slopes: int = 0
    casts: Casts = ()
    lengths_as_given: bool = False
    ordered: Ordered | None = None
    places: tuple[int, ...] | None = None
    ready: Ready | None = None
    ready_all: Ready | None = None
    trained: Trained | None = None
    trained_all: Trained | None = None


def arguments_of(call: AttentionCall, deterministic: bool, num_splits: int | None) -> Arguments:
    """Arguments of the operation for a checked call."""
    scale, (left, right) = call.softmax_scale, call.window
    aligned = call.mask.endswith("_bottom_right")
    return Arguments(
        layout=call.layout,
        mask=call.mask,
        softmax_scale=None if scale is None else float(scale),
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
        bottom_right=aligned if call.bottom_right is None else call.bottom_right,
        out_dtype=name_of(fp8.output_dtype(call)),
        amax=call.return_amax,
        deterministic=deterministic,
        softcap=float(call.softcap),
        softmax=call.softmax,
        max_logit=call.return_max_logit,
        dropout_p=float(call.dropout_p),
        num_splits=num_splits or 0,
        bias_type="post_scale" if call.bias is None else call.bias_type,
    )


def default_slopes_of(call: AttentionCall) -> int:
    """Query heads of a checked call that take ALiBi's own slopes; 0 where none do."""
    if not call.has_alibi or isinstance(call.alibi_slopes, Tensor):
        return 0
    layout = layouts.parse(call.layout)
    q = layouts.unpack(layout, call.q, call.k, call.v)[0]
    return layouts.size(q.shape, layout.q_format, "h")
