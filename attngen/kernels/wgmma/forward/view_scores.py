"""View, scores: what becomes of them in a forward kernel, before and within their softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....spec.problem import Problem
from ...uses import FragmentUse, lines_of
from .plan import Plan
from .traits import converts, raises_rarely


@dataclass(frozen=True)
class Bounds:
    """Keys that masks hide: before some (left), behind some (right), all past the diagonal. steady:
    whether neighbouring rows differ by one key at either end, at most."""

    left: bool
    right: bool
    past: bool
    steady: bool


@dataclass(frozen=True)
class Scores:
    """Scores, from products of queries and keys to their softmax.

    first, second: names of the first two fragments, empty where there are fewer; first_struct: the
    first one's struct. scaled: whether scores come to the softmax scaled. small: whether the first
    has a cheaper form for small scores. linear: whether a lone fragment adds a line by the distance
    from the diagonal; by_place: whether a fragment is told an element's place, as a line is that
    masks do not end at the diagonal.
    line_in_products: products of queries and keys join the line, which is the same for every block:
    not those of 8 bits, which tensor cores would cut to the bits of the sum. line_ahead: it is
    worked out among the exponentials of the block before; where warpgroups take turns that is
    slower, and random words, or a mask's bits, leave it no registers. skips_faint: far blocks are
    passed over in which a line leaves faint weights alone: neither weighed nor summed.
    skips_far_keys: blocks of far keys are not even visited, as the rest of a score is bounded.
    bent_late: scores are bent only as they become weights, where the special-function unit leaves
    room for a polynomial: their order, and so the largest, stays. low_polynomial: those need no
    bound either, where none is large. sums_tell: a block is weighed as if none of its scores were
    large, and the sums of its weights tell: where there are stages enough to keep blocks of keys
    until then, and weights may be far above 1, as float16's may not. Beside a window's ends
    products would be serialised.
    pairs_ahead: what scores read of a block is taken while its product runs, where registers hold
    it until then; pairs_in_turn: it is taken with each score.
    by_token: whether each token has a scale. scale_place: C++, what a place says of its product's
    then, else empty. lines: C++, the type of lines of keys and distances, of a score of a callable,
    else empty; keeps_lines: whether there are any; lined: the name of that score.
    parameters, arguments: C++, of prepare_scores behind the block. before_product: C++, a
    statement.
    """

    first: str
    second: str
    first_struct: str
    scaled: bool
    small: bool
    linear: bool
    by_place: bool
    line_in_products: bool
    line_ahead: bool
    skips_faint: bool
    skips_far_keys: bool
    bent_late: bool
    low_polynomial: bool
    sums_tell: bool
    pairs_ahead: bool
    pairs_in_turn: bool
    by_token: bool
    scale_place: str
    lines: str
    keeps_lines: bool
    lined: str
    parameters: str
    arguments: str
    before_product: str


def scores_of(problem: Problem, plan: Plan, uses: Sequence[FragmentUse], bounds: Bounds) -> Scores:
    """The way of scores to the softmax. uses: their fragments."""
    fragments = [use.fragment for use in uses]
    linear = len(fragments) == 1 and fragments[0].linear
    late = bent_late(problem, uses) and not plan.shares_output
    low = late and plan.softmax.lazy_rescale_log2 > 0
    line_in_products = linear and bounds.past and not problem.eight_bit
    crowded = plan.pipeline.take_turns or problem.dropout or problem.attn_mask
    line_ahead = line_in_products and not crowded
    tile = any(use.tile for use in uses)
    pairs_ahead = tile and takes_pairs_ahead(problem, plan)
    arguments = _arguments(linear=linear, seen=problem.attn_mask, pairs=pairs_ahead)
    names = [fragment.name for fragment in fragments] + ["", ""]
    lines = lines_of(uses)
    return Scores(
        first=names[0],
        second=names[1],
        first_struct=fragments[0].struct if fragments else "",
        scaled=any(fragment.scaled for fragment in fragments),
        small=bool(fragments) and fragments[0].small,
        linear=linear,
        by_place=bool(fragments) and not (linear and bounds.past),
        line_in_products=line_in_products,
        line_ahead=line_ahead,
        skips_faint=line_ahead and skips_faint_blocks(problem, plan, bounds),
        skips_far_keys=skips_far_keys(problem, uses, bounds),
        bent_late=late,
        low_polynomial=low,
        sums_tell=low and keeps_blocks_for_sums(problem, plan, bounds),
        pairs_ahead=pairs_ahead,
        pairs_in_turn=tile and not pairs_ahead,
        by_token=problem.token_scales,
        scale_place=_scale_place(problem, tile=tile),
        lines=f"ScoreLines<kTileN, {', '.join(map(str, lines))}>" if lines else "",
        keeps_lines=any(lines),
        lined=next((fragment.name for fragment in fragments if fragment.lines), ""),
        parameters="".join(f", {type_}" for type_ in arguments.values()),
        arguments="".join(f", {name}" for name in arguments),
        before_product=_before_product(line_in_products, line_ahead),
    )


def bent_late(problem: Problem, uses: Sequence[FragmentUse]) -> bool:
    """Whether scores are bent only as they become weights."""
    return len(uses) == 1 and uses[0].fragment.small and not problem.attn_mask


def skips_faint_blocks(problem: Problem, plan: Plan, bounds: Bounds) -> bool:
    """Whether far blocks of faint weights are passed over, beside a line worked out ahead."""
    ahead = plan.softmax.quarters_ahead > 0 and raises_rarely(plan, late=False)
    return ahead and not bounds.left


def skips_far_keys(problem: Problem, uses: Sequence[FragmentUse], bounds: Bounds) -> bool:
    """Whether a line joins scores that are bent before it, and so bounded."""
    if len(uses) != 2 or problem.attn_mask or converts(problem):
        return False
    first, second = (use.fragment for use in uses)
    return first.small and second.linear and bounds.past


def keeps_blocks_for_sums(problem: Problem, plan: Plan, bounds: Bounds) -> bool:
    """Whether stages keep blocks of keys until sums of bfloat16 weights tell of large scores."""
    staged = plan.pipeline.k_stages > 2 and not plan.pipeline.q_in_registers
    ahead = plan.softmax.quarters_ahead > 0
    return problem.dtype_q == "bf16" and ahead and staged and not bounds.left


def takes_pairs_ahead(problem: Problem, plan: Plan) -> bool:
    """Whether registers hold what scores read of a block until its product is done."""
    beside = problem.varlen or problem.gather or problem.paged or problem.widens
    drawn = problem.dropout or problem.attn_mask
    return plan.pipeline.consumers == 2 and not (beside or drawn)


def _arguments(*, linear: bool, seen: bool, pairs: bool) -> dict[str, str]:
    """Arguments of prepare_scores behind the block, and their declarations."""
    found = {"line": "float (&line)[2]"} if linear else {}
    found |= {"seen": "MaskBits<kTileN>& seen"} if seen else {}
    return found | ({"pairs": "const ScorePairs& pairs"} if pairs else {})


def _scale_place(problem: Problem, *, tile: bool) -> str:
    """C++: the scale of a product at its place, behind an element of a tile where there is one."""
    if not problem.token_scales:
        return ""
    before = "" if tile else ", 0.f"
    return f"{before}, query_scale[half] * (i % 2 ? key_scale.y : key_scale.x)"


def _before_product(line_in_products: bool, line_ahead: bool) -> str:
    """C++: what begins the sums of a product of queries and keys."""
    if not line_in_products:
        return ""
    return "settle(scores);" if line_ahead else "start_scores(scores);"
