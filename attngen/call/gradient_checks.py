"""Gradients that kernels do not have, by descriptions of a call's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import eq

from ..spec.attention_spec import MAX_TRAINED_HEAD_DIM
from .bias import sizes_of
from .bias_gradient import column_violations
from .fragments import SLOTS
from .numbers import Arguments
from .operands import extents_of, output_dtype, unpacked
from .table import GRADIENT_OF, INPUTS
from .tensors import Described, dtype_name, is_fp8

PAGES, BIAS = map(INPUTS.index, ("page_table_k", "bias"))


def no_gradient(name: str) -> str | None:
    """Why kernels have no gradient of the operand of that name; None where they have."""
    if name in GRADIENT_OF:
        return None
    if name in SLOTS:
        return "operands of fragments have no gradient: detach them, or pass backend='reference'"
    return f"{name} has no gradient: detach it, or pass backend='reference'"


def gradient_violations(
    operands: Sequence[Described | None],
    arguments: Arguments,
    bias_learns: bool,
    surely: Callable[[int, int], bool] = eq,
) -> Iterator[str]:
    """Why kernels have no gradients of a call that needs them.

    operands: of `table.INPUTS`; bias_learns: whether its bias needs one; surely: whether a size is
    known to be a number.
    """
    q, k, v = operands[:3]
    assert q is not None  # the operation's schema
    if is_fp8(q) or (k is not None and is_fp8(k)):
        yield (
            "a gradient is needed, of which this operation has none in FP8: call "
            "attngen.attention, whose gradients have 16 bits, or detach what requires it"
        )
    elif output_dtype(q, arguments) != dtype_name(q):
        yield (
            "a gradient is needed, but kernels have none of a float32 output beside 16-bit "
            "operands: call under torch.no_grad(), or leave out_dtype out"
        )
    if operands[PAGES] is not None:
        yield "pages are inference only; call under torch.no_grad()"
    if any(x is not None and x.shape[-1] > MAX_TRAINED_HEAD_DIM for x in (q, k, v)):
        yield (
            f"a gradient is needed, but head dims above {MAX_TRAINED_HEAD_DIM} have none; call "
            "under torch.no_grad()"
        )
    added = operands[BIAS]
    if added is None or not bias_learns:
        return
    *_, columns = sizes_of(added.shape)
    if surely(columns, 1):
        _, k, _ = unpacked(q, k, v, arguments.layout)
        yield from column_violations(added, extents_of({"k": k}, arguments.layout)["k"].seq)
