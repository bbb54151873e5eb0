"""Numbers and names of a call, as the operations take them."""

from __future__ import annotations

from typing import NamedTuple


class Arguments(NamedTuple):
    """The arguments of a call that are no tensors.

    layout: any name. softmax_scale: None for 1/√d. Window sides in keys, −1 unbounded. out_dtype:
    torch's name of it (AOTInductor of torch 2.11 hands over dtypes as others), None for Q's, or
    bfloat16 beside FP8; of 16 bits float32 asks for the partial output that split
    computations combine. amax: whether the maxima of an FP8 call are wanted. deterministic: whether
    gradients have the same bits on every run, at the cost of some speed. softcap: bound of the
    scores, 0 for none. softmax: `vanilla`, `off_by_one` or, with a sink tensor, `learnable`.
    max_logit: whether the largest score of each head is wanted. dropout_p: probability in 0..1;
    above 0 it needs `rng_state`. num_splits: CTAs that share the keys of one sequence where there
    are few queries, 0 for as many as fill the chip, −1 for as many of packed keys, too. bias_type:
    whether a bias tensor is added to scaled scores, `post_scale`, or to the products before that,
    `pre_scale`. score_mod: the names of score fragments, joined by +, empty for none. numbers: of
    the operands of the fragments that the call names, those that may be numbers, as words in the
    order of call/fragments.py. positions: words of call/positions.py, empty where the call gives
    none. memory: orders of axes, as call/memory.py writes them, in which the output and the
    gradients of q, k and v lie, empty where they are contiguous.
    """

    layout: str = "bshd"
    mask: str = "none"
    softmax_scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    out_dtype: str | None = None
    amax: bool = False
    deterministic: bool = False
    softcap: float = 0.0
    softmax: str = "vanilla"
    max_logit: bool = False
    dropout_p: float = 0.0
    num_splits: int = 0
    bias_type: str = "post_scale"
    score_mod: str = ""
    numbers: str = ""
    positions: str = ""
    memory: str = ""
