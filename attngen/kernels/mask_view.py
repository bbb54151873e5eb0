"""View, masks of pairs: where a kernel finds whether these take part."""

from __future__ import annotations

from dataclasses import dataclass

from ..fragments.features import program_named
from ..fragments.mask_lowering import captured_members
from ..spec.problem import Problem
from .uses import FragmentUse


@dataclass(frozen=True)
class AskedMaskView:
    """A mask that kernels ask themselves. struct: C++, that of its program; captures: members of it
    that say where captured tensors lie, behind it; pair: C++, the pair of a row and a column of a
    fragment; map: the function that finds which blocks rows see, empty where those who ask have
    found that a block is shown in part."""

    struct: str
    captures: tuple[str, ...]
    pair: str
    map: str = ""


@dataclass(frozen=True)
class PairMaskView:
    """A mask of pairs. tensor: the parameter that leads to its bits, a row a query or a row a key,
    or to what its program reads; asked: the program, None where there are bits."""

    tensor: str
    asked: AskedMaskView | None


def pair_mask_view(
    problem: Problem, uses: dict[str, list[FragmentUse]], *, of_keys: bool = False, map: str = ""
) -> PairMaskView | None:
    """The mask of a kernel; None where it has none. of_keys: whether rows of fragments are keys;
    map: as `AskedMaskView` has it."""
    if not problem.attn_mask:
        return None
    tensor = "mask_columns" if of_keys else "mask_rows"
    for use in uses["asked"]:
        program = program_named(use.fragment.name)
        assert program is not None
        captures = captured_members(program)
        pair = "column, row" if of_keys else "row, column"
        return PairMaskView(tensor, AskedMaskView(use.fragment.struct, captures, pair, map))
    return PairMaskView(tensor, None)
