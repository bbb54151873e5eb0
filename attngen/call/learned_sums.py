"""Sums of what a score learns, as kernels write them."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import SpecError
from .fragments import LEARNED_SLOT
from .numbers import Arguments
from .prepared import Output
from .tensors import TensorDesc

DIGITS = 9  # of an exact sum, 24 bits each, and as many of its carries
LEAST_EXPONENT = -88  # of the first digit's unit
WORDS = DIGITS + 1  # behind them, how many terms were no numbers
MOST_BYTES = 4 << 30  # of exact sums


def learned_sums(
    given: Mapping[str, TensorDesc | None], arguments: Arguments
) -> tuple[Output, ...]:
    """The output that has the gradients of all that a score learns: float32 [n], or, exact whatever
    the order, int64 [n, WORDS] of a deterministic call.

    Raises: SpecError where exact sums take more than `MOST_BYTES`.
    """
    stands = given[LEARNED_SLOT]
    assert stands is not None  # where it is wanted
    (count,) = stands.shape
    if not arguments.deterministic:
        made = TensorDesc.contiguous((count,), "float32")
    elif count * WORDS * 8 > MOST_BYTES:
        raise SpecError(
            f"score_mod learns {count} numbers, whose deterministic gradient takes "
            f"{count * WORDS * 8 >> 30} GiB, more than {MOST_BYTES >> 30}: pass "
            "deterministic=False, or a bias."
        )
    else:
        made = TensorDesc.contiguous((count, WORDS), "int64")
    return (Output.like("dlearned", made, 0.0, preset=True),)
