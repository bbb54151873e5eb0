"""C++ of a consumer that follows from the problem alone: statements and factors."""

from __future__ import annotations

from ....spec.problem import Problem


def raise_rarely(problem: Problem, slack: str) -> str:
    """C++: how rows whose maxima are outgrown by far raise these, and whether any did: those of a
    warp together, or each by itself where a token's scale is its own."""
    arguments = f"scores, state, {slack}, rescale"
    return (
        f"raise_rows(softmax, {arguments})"
        if problem.token_scales
        else f"softmax.raise_rarely({arguments})"
    )


def settle(problem: Problem, *, lazy: bool) -> str:
    """C++: how scores of large rows meet their maxima: where a token's scale is its own, so that no
    row of a warp changes a bit of another."""
    if problem.token_scales:
        return "settle_rows(softmax, scores, state);"
    return f"{'if (grew) ' if lazy else ''}softmax.settle_raised(scores, state, kLazyRescaleLog2);"


def drop_weights(problem: Problem) -> str:
    """C++: the statement that zeroes the dropped ones among a block's weights."""
    if not problem.dropout:
        return ""
    if not problem.eight_bit:
        return "drop_words().template drop<Element>(weights, lane);"
    threshold = "{static_cast<u32>(p.drop_low), static_cast<u32>(p.drop_high)}"
    return f"drop_bytes<kTileN>(weights, drop_words(), {threshold}, lane);"


def keep_factor(problem: Problem) -> str:
    """C++: what the output is multiplied by for what dropout leaves of the weights."""
    if not problem.dropout:
        return ""
    # Those of 16 bits are multiplied by what float16's 1 is in their format.
    return " * p.keep_scale" if problem.eight_bit else " * (p.keep_scale / Element::kOfFp16One)"
