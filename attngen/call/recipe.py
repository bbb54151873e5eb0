"""The recipe in force: what turns 16-bit operands of calls into FP8 ones; None for nothing.

It is the process's, not a thread's: a backward recomputes what was checkpointed in a thread of its
own, and torch.compile guards the attribute of an object, but none of a thread's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class GradientForm(NamedTuple):
    """How a backward in 8 bits stores the gradient of the output, dO, where no history says it.

    d_o_dtype: torch's name of its dtype, which dS has, too; empty for a backward in 16 bits.
    margin: binades left free above its largest magnitude; power_of_two: whether its scale is one;
    amax_epsilon: the least magnitude that is taken. mixed: whether P and dS have bfloat16 instead.
    """

    d_o_dtype: str = ""
    margin: int = 0
    power_of_two: bool = True
    amax_epsilon: float = 0.0
    mixed: bool = False


class StoredGradients(NamedTuple):
    """A backward in 8 bits that a recipe asks for.

    may_have_16_bits: whether a call that kernels have no such backward for gets one of 16 bits. Of
    a layer, float32 [2], of dO and dS: scale, 0 where the call's own numbers decide, and amax, the
    magnitudes that backwards note.
    """

    form: GradientForm = GradientForm()
    may_have_16_bits: bool = False
    scale: Tensor | None = None
    amax: Tensor | None = None


IN_16_BITS = StoredGradients()


class Quantised(NamedTuple):
    """Operands in FP8, None where one is packed into another, and what is said of them: arguments
    of attention such as descale_q, by their names. by_token: whether scales of q, k and v are one a
    row of their carrier, in its order. gradients: how their backward stores its own."""

    carriers: tuple[Tensor | None, ...]
    scales: dict[str, Tensor | None]
    gradients: StoredGradients = IN_16_BITS
    by_token: bool = False


class Narrowed(NamedTuple):
    """Tensors in 8 bits. numbers: float32 [3, n, 1], their largest magnitudes, by what they were
    multiplied, and what undoes it. Where each row has a scale of its own, numbers are [3, rows of
    all], in any order, and by_row what undoes the scales of each tensor, in its shape but for the
    last axis."""

    stored: tuple[Tensor, ...]
    numbers: Tensor
    by_row: tuple[Tensor, ...] = ()

    @property
    def amax(self) -> tuple[Tensor, ...]:
        """Their largest magnitudes, each float32 [1]."""
        return self.numbers.select(0, 0).unbind()

    @property
    def scale(self) -> tuple[Tensor, ...]:
        """Their scales, as well."""
        return self.numbers.select(0, 1).unbind()

    @property
    def descale(self) -> tuple[Tensor, ...]:
        """Their reciprocals."""
        return self.numbers.select(0, 2).unbind()


class Narrow(Protocol):
    """Casts tensors."""

    def __call__(
        self,
        tensors: Sequence[Tensor],
        used: Sequence[Tensor | None],
        rule: CastRule,
        known: Tensor | None = None,
    ) -> Narrowed:
        """The tensors in 8 bits.

        used: where their numbers count, a broadcast of each, None for everywhere; known: scales,
        float32 [n], of which those count that are above 0.
        """


class CastRule(NamedTuple):
    """How scales follow from largest magnitudes.

    dtype: torch's name of the stored format; least: the least magnitude that is taken; margin:
    binades left free above; power_of_two: whether a scale is one; by_token: whether each row of a
    tensor, along its last axis, has a scale of its own.
    """

    dtype: str
    least: float = 0.0
    margin: int = 0
    power_of_two: bool = True
    by_token: bool = False


class StepRule(NamedTuple):
    """How the next scales follow from a history of largest magnitudes, [steps, columns].

    dtype: torch's name of the format; own: columns at the front whose scale is 0, since calls find
    it; of_all: whether the largest of all steps counts, or that of the newest; margin: binades left
    free above it; power_of_two: whether a scale is one.
    """

    dtype: str
    own: int
    of_all: bool
    margin: int
    power_of_two: bool


class Recipe(Protocol):
    """How operands become FP8."""

    def quantise(
        self,
        carriers: Sequence[Tensor | None],
        rows: Sequence[Tensor | None],
        narrowed: Narrow,
    ) -> Quantised:
        """q, k and v, packed as a call has them, in FP8; never waits for the device.

        rows: which rows of each belong to a sequence, a broadcast of it, None for all. What others
        hold must change nothing. narrowed: casts tensors.

        Raises: SpecError where the recipe cannot serve the call.
        """

    def stored_gradients(self) -> StoredGradients:
        """How the backward of a call of FP8 operands stores its gradients."""


class InForce:
    """The recipe of all calls; `attngen.fp8.autocast` sets it."""

    recipe: Recipe | None = None


in_force = InForce()


@contextmanager
def without_recipe() -> Iterator[None]:
    """Have no recipe in force inside."""
    before, in_force.recipe = in_force.recipe, None
    try:
        yield
    finally:
        in_force.recipe = before
