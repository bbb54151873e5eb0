"""The recipe in force: what turns 16-bit operands of calls into FP8 ones; None for nothing.

It is the process's, not a thread's: a backward recomputes what was checkpointed in a thread of its
own, and torch.compile guards the attribute of an object, but none of a thread's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Quantised(NamedTuple):
    """Operands in FP8, None where one is packed into another, and what is said of them: arguments
    of attention such as descale_q, by their names."""

    carriers: tuple[Tensor | None, ...]
    scales: dict[str, Tensor | None]


class Recipe(Protocol):
    """How operands become FP8."""

    def quantise(
        self, carriers: Sequence[Tensor | None], rows: Sequence[Tensor | None]
    ) -> Quantised:
        """q, k and v, packed as a call has them, in FP8; never waits for the device.

        rows: which rows of each belong to a sequence, a broadcast of it, None for all. What others
        hold must change nothing.

        Raises: SpecError where the recipe cannot serve the call.
        """


class InForce:
    """The recipe of all calls; `attngen.fp8.autocast` sets it."""

    recipe: Recipe | None = None


in_force = InForce()
