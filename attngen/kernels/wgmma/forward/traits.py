"""Traits: facts about a forward problem and its plan that shape several parts of a kernel."""

from __future__ import annotations

from ....spec.problem import Problem
from ..shared import boxes_of
from .choices import own_columns
from .plan import Plan


def converts(problem: Problem) -> bool:
    """Whether threads between the loaders and the consumers transpose V, or widen K and V."""
    return problem.eight_bit or problem.widens


def one_loader(problem: Problem, plan: Plan) -> bool:
    """Whether three consumers of 8-bit operands leave room for one warpgroup beside them: one of
    its threads loads everything, its other warps transpose."""
    return problem.eight_bit and plan.pipeline.consumers == 3


def cuts_tiles(problem: Problem, plan: Plan) -> bool:
    """Whether tiles of one loader's consumers, where all cost the same, are of two sizes."""
    return one_loader(problem, plan) and not plan.schedule.longest_first


def rolls(problem: Problem, plan: Plan) -> bool:
    """Whether a warpgroup visits the blocks that its own rows see, and passes over the tile's
    others, since a block is no larger than what its rows see less than the tile."""
    pipeline = plan.pipeline
    free = pipeline.consumers > 1 and not (pipeline.take_turns or pipeline.q_in_registers)
    return problem.narrow and free and plan.tile.n == 64


def rest_columns(problem: Problem, plan: Plan) -> int:
    """Columns of the output that a second warpgroup has of the same rows; 0 where there is none."""
    return problem.head_dim_v - own_columns(problem) if plan.shares_output else 0


def first_boxes(boxes: int, plan: Plan) -> int:
    """Boxes of the first part of a block of K or V, of so many in all."""
    return -(-boxes // 2) if plan.pairs else boxes


def parts_of(head_dim: int, plan: Plan) -> int:
    """Parts of a block of K or V, each with barriers of its own."""
    boxes = boxes_of(head_dim)
    return 1 + (first_boxes(boxes, plan) < boxes)


def starts_early(problem: Problem, plan: Plan) -> bool:
    """Whether the kernel may start before the one in front has ended, for which it waits itself:
    where that one may tell it lengths, and where the beginning counts, in short calls and under
    windows. With three consumers the compiler makes slower code of it (measured 0.9 % at 64)."""
    window = "window" in problem.masks and plan.pipeline.consumers == 2
    return problem.varlen or plan.ctas > 1 or window or rolls(problem, plan)


def fills_gaps(problem: Problem, plan: Plan) -> bool:
    """Whether the kernel fills rows of the output that belong to no sequence, which are left as
    they are where outputs join."""
    return plan.orders_few and problem.q_seq != "dense" and not problem.continues


def clears_tail(problem: Problem) -> bool:
    """Whether V's last block, over pages, is cleared behind the sequence's end as it is loaded."""
    return problem.paged and not problem.widens


def scale_log2(problem: Problem) -> str:
    """C++: what a product of stored Q and K is multiplied by for scores in log2 units."""
    return "scale_log2" if converts(problem) else "p.scale_log2"


def first_row_of(problem: Problem, plan: Plan, row_block: str) -> str:
    """C++: the first of a CTA's rows of the tile that `row_block` says."""
    if plan.pairs:
        return f"{row_block} * kTileM + cluster_rank() * 64"
    return f"first_row_of({row_block})" if one_loader(problem, plan) else f"{row_block} * kTileM"


def raises_rarely(plan: Plan, *, late: bool) -> bool:
    """Whether most blocks need but a bound of their maxima, since rows keep theirs until these are
    outgrown. late: whether scores are bent only as they become weights."""
    order = plan.softmax
    bounded = order.lazy_rescale_log2 > 0 and not (order.rescale_first or late)
    return bounded or order.parts > 0
