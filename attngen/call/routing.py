"""Choice: whether some kernel serves a call, by descriptions of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..fragments import features
from ..spec.attention_spec import DTYPES_8BIT, MAX_HEAD_DIM, AttentionSpec, dtype_name
from ..spec.layouts import axes_of, parse
from ..spec.mixed import MIXED
from ..spec.resolve import find_violations
from ..targets.target import DEFAULT, names
from .decode import unsplit
from .fp8_checks import backward_violations
from .served import of_backward, unserved, without_splits
from .table import CARRIERS, LENGTHS, ROWS, AttentionCall

_FEATURES = features.scan()  # here, not in a call: torch.compile cannot trace file access
# Arguments that decide which forward a call needs, beside q, k and v.
_DECIDING = (
    *("layout", "mask", "window", "bias", "bias_type", "softcap", "score_mod", "mask_mod"),
    *("block_mask", "softmax", "dropout_p", "out_dtype", "return_max_logit", "num_splits"),
    *("attn_mask", "alibi_slopes", "positions", "places"),
    *LENGTHS,
)
# Others, each with the switch of a spec that it turns by being there.
_SWITCHES = tuple(
    (name, row.feature) for name, row in ROWS.items() if row.feature and name not in _DECIDING
)
MANY = 1 << 20  # positions: no few queries


def no_kernels(device: str) -> str:
    """The refusal of a device that has no kernels."""
    return f"{device} has no kernels; available: {', '.join(names())}"


@dataclass(frozen=True)
class _Traced:
    """An operand of which a trace says nothing but this."""

    dtype: Any
    shape: tuple[int, ...]


def _carriers(call: AttentionCall, traced: bool) -> tuple[Any, ...]:
    """Q, K and V as the choice of a kernel sees them. Of a trace, whose sizes may be symbols,
    dtypes and head dims alone: which of a variant's kernels a call takes is for the operation to
    say when it runs. Wide heads, of which some have kernels for few queries alone, and operands
    that the copy engine alone reads, are looked at as they are."""
    operands = call.q, call.k, call.v
    if not traced:
        return operands
    layout = parse(call.layout)
    widest = max(*[x.shape[-1] for x in operands if x is not None], 0)
    unboxed = any(x is not None and dtype_name(x.dtype) in DTYPES_8BIT for x in operands)
    if widest > MAX_HEAD_DIM or unboxed or call.num_splits or layout.paged:
        return operands
    sizes = {"h": 1, "3": 3, "2": 2}
    found: list[_Traced | None] = []
    for name, x in zip(CARRIERS, operands, strict=True):
        if x is None:
            found.append(None)
        else:
            shape = [sizes.get(axis, MANY) for axis in axes_of(layout, name)]
            found.append(_Traced(x.dtype, (*shape[:-1], x.shape[-1])))
    return tuple(found)


def spec_of_call(call: AttentionCall, traced: bool = False) -> AttentionSpec:
    """The spec of the forward that a call needs.

    call: its tensors are described, by their library or as `TensorDesc`. traced: whether their
    sizes may be symbols.
    """
    arguments = {name: getattr(call, name) for name in _DECIDING}
    spec = AttentionSpec.of_arguments(_carriers(call, traced), arguments)
    switches: dict[str, Any] = {to: getattr(call, name) is not None for name, to in _SWITCHES}
    return replace(spec, **switches) if switches else spec


def refusals(
    call: AttentionCall,
    traced: bool = False,
    arch: str = DEFAULT.name,
    directions: tuple[str, ...] = ("fwd",),
) -> list[str]:
    """Why no kernel serves a call; empty where one does. arch: the architecture whose kernels its
    device runs; directions: those that it needs. Other arguments as of `spec_of_call`."""
    spec = spec_of_call(call, traced)
    reasons = [violation.reason for violation in find_violations(spec, _FEATURES)]
    if not reasons:
        spec = spec if call.num_splits else without_splits(spec, arch)
        reasons += unserved(spec, arch)
        if "bwd" in directions and arch != DEFAULT.name:
            backward = of_backward(spec)
            # What no architecture has `gradient_checks` refuses, in words that hold for all.
            reasons += [] if find_violations(backward, _FEATURES) else unserved(backward, arch)
    return [*dict.fromkeys(reasons)] + unsplit(call.num_splits or 0, spec.decode)


def can_join(call: AttentionCall, arch: str) -> bool:
    """Whether kernels that serve a call, which asks for a float32 output, can also join what they
    compute with an output and an LSE that are there. arch: as of `refusals`."""
    spec = replace(spec_of_call(call), decode=False, continues=True)
    return not (find_violations(spec, _FEATURES) or unserved(spec, arch))


def backward_refusals(
    call: AttentionCall, d_o_dtype: str, traced: bool = False, *, mixed: bool = False
) -> list[str]:
    """Why no kernel computes the backward of a call of FP8 operands in 8 bits; empty where one
    does. d_o_dtype: the name of the dtype of its output's gradient; mixed: whether products of
    weights and of dS have 16 bits."""
    spec = replace(
        spec_of_call(call, traced),
        directions=("bwd",),
        d_o_dtype=dtype_name(d_o_dtype),
        backward=MIXED if mixed else None,
        grad_dtype=None if call.out_dtype is None else dtype_name(call.out_dtype),
        decode=False,
    )
    reasons = [violation.reason for violation in find_violations(spec, _FEATURES)]
    return reasons + [*backward_violations(call.scales)]
