"""View parts, backward: what templates of several kernels read, each decision with its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...spec.problem import Problem
from ..fill import emit_fragments
from ..uses import FragmentUse
from ..view import (
    FragmentView,
    ScoreListView,
    fragment_view,
    score_list_view,
)

Uses = dict[str, list[FragmentUse]]
# Statements that zero a block's count of the tiles that have added to its dQ, or one for each half
# of dQ's columns.
ZEROED_TURNS = "if (threadIdx.x == 0) static_cast<int*>(p.turns)[slot] = 0;"
ZEROED_HALVES = "if (threadIdx.x < 2) static_cast<int*>(p.turns)[2 * slot + threadIdx.x] = 0;"


@dataclass(frozen=True)
class SequenceView:
    """Where positions of queries, or of keys, lie, as a fragment says it.

    dense: all sequences have one length and lie behind each other. packed: sequences of several
    lengths lie behind each other in one tensor.
    """

    fragment: FragmentView
    dense: bool
    packed: bool


@dataclass(frozen=True)
class Alias:
    """A C++ type under the name by which the template knows it."""

    name: str
    struct: str


RISING = frozenset({"softcap"})  # scores that bend, whose derivatives are never negative


@dataclass(frozen=True)
class ScoresView:
    """Scores between their products and the softmax.

    list: the scores of which the kernel makes weights, in the units of products; None where there
    are none. scaled_list: the scores of rows whose LSE shows no sum, scaled; None without a bias.
    bend: whether the derivative of some score is not 1; signed: whether it may be negative, so that
    a weight times it says by no sign whether it is dropped. tile: the parameter of the tensor that
    scores read in tiles, a bias; None without one. added: whether a tile's elements are added to
    products, and nothing bends scores, so that the list comes before any is hidden; listed: whether
    weights are made by way of the list otherwise.
    """

    list: ScoreListView | None
    scaled_list: ScoreListView | None
    bend: bool
    signed: bool
    tile: str | None
    added: bool
    listed: bool


def structs_of(uses: Uses, root: Path) -> str:
    """The structs of the fragments in use, each once."""
    return "\n\n".join(emit_fragments(root, uses))


def sequence_view(use: FragmentUse) -> SequenceView:
    """The sequence of queries or keys whose fragment is used."""
    name = use.fragment.name
    return SequenceView(fragment_view(use), name == "dense", name == "packed")


def scores_view(
    scores: Sequence[FragmentUse], masks: Sequence[FragmentUse], *, weighed: bool = True
) -> ScoresView:
    """The scores of a backward's kernel. weighed: whether it makes weights of any but those of
    rows whose LSE shows no sum."""
    tile = next((use.tile for use in scores if use.tile), None)
    bend = any(not use.fragment.additive for use in scores)
    scaled = score_list_view(
        *(scores, masks),
        gradient=True,
        scales=True,
        name="ScaledScoreList",
        function="scaled_score_list",
    )
    return ScoresView(
        list=score_list_view(scores, masks, gradient=True) if weighed else None,
        scaled_list=scaled if tile else None,
        bend=bend,
        signed=any(not (use.fragment.additive or use.fragment.name in RISING) for use in scores),
        tile=tile,
        added=tile is not None and not bend,
        listed=bool(scores) and (tile is None or bend),
    )


def q_len_of(problem: Problem) -> str:
    """The number of queries of a sequence, C++."""
    return "q_len" if problem.varlen else "p.q_len"


def tensor_row_of(problem: Problem) -> str:
    """The tensor's row of position `row` of a sequence, C++."""
    return "(first_token + row)" if problem.varlen else "row"


def included(*headers: tuple[str, bool]) -> str:
    """The lines that include headers. headers: names under attngen/, and whether each is wanted."""
    return "\n".join(f'#include "attngen/{name}"' for name, wanted in headers if wanted)
