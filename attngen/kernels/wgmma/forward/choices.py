"""Choices of a forward's plan: what is worth trying, and what justified the heuristics.

Figures marked `measured` are from an H200 at 700 W; docs/results/forward.json has what the chosen
plans reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ....fragments.program import has_program
from ....fragments.score_lines import are_light
from ....spec.attention_spec import MAX_HEAD_DIM
from ....spec.problem import TOKEN_SCALES, Problem
from ..shared import LIGHT_SCORES, boxes_of
from .plan import SoftmaxOrder

# Tensor cores cut 8-bit products to the bits of the running sum. Up to so many columns of V each
# block's sum joins a total in registers (measured at 64: 541 and 534 TFLOP/s, full and causal, a
# mean every 1024 keys 501 and 518); above, sums of so many keys, by the number of consumers, join
# a mean in shared memory: 1024 lose 1.5 % of sums of one sign and 1 to 7 % of the speed (512: 0.7
# and 7 to 13 %). Three are 2 to 5 % faster with 1920, which lose 3 %, than with 960.
TOTAL_COLUMNS = 64
PROMOTE_KEYS = {2: 1024, 3: 1920}
RAW_STAGES = 2  # buffers of 8-bit V before it is transposed
RAW_UNIT = 32  # keys, the fewest that are transposed at a time
THREE_FROM = 112  # columns of V, from which on three consumers take 8 bits
SMALLEST_BLOCK = 32
K_STAGES = {2: (3, 2), 3: (2,), 4: (4,)}
NARROW_STAGES = {1: (6, 5), 2: (4, 4), 3: (3, 2), 4: (3, 2)}  # of K and of V, by boxes of a row
# Fastest of four orders, by largest head dim (up to) and whether there are masks: 16k tokens (8k
# at 192), measured beside each other. Rescaling first: +1 % at 64 causal, +2 % at 128 full, +1.5 %
# at 256 causal, but -2 to -5 % at 128 causal and 192. Sums in pairs: 0 to +2.5 %, but -3 % at 64
# full. At 256, rescaling 128 registers only when a maximum grows: +5 to +9 %.
SOFTMAX_ORDERS = {
    (96, False): SoftmaxOrder(0, rescale_first=False, pair_sums=False),
    (96, True): SoftmaxOrder(0, rescale_first=True, pair_sums=True),
    (128, False): SoftmaxOrder(0, rescale_first=True, pair_sums=True),
    (128, True): SoftmaxOrder(0, rescale_first=False, pair_sums=True),
    (192, False): SoftmaxOrder(0, rescale_first=False, pair_sums=True),
    (192, True): SoftmaxOrder(0, rescale_first=False, pair_sums=True),
    (256, False): SoftmaxOrder(8, rescale_first=True, pair_sums=True),
    (256, True): SoftmaxOrder(8, rescale_first=True, pair_sums=True),
}
# Up to 192 the output is rescaled lazily, by bounds of the maxima, and from 104 part of the
# exponentials is ahead of the wait for the product before: quarters of a block, by the same keys.
# Measured beside the orders above: +2 to +4 % at 64 and +6 % at 96 with none ahead; +3 to +6 % at
# 128 and +4 to +5 % at 192, before bounds, which bring +5 to +7 % and nothing; -1 to 0 % at 256.
QUARTERS_AHEAD = {
    (96, False): 0,
    (96, True): 0,
    (128, False): 1,
    (128, True): 2,
    (192, False): 2,
    (192, True): 1,
}
LAZY_LOG2 = 8
# Beside a softcap, where blocks that outgrow maxima are dear, as far as float16 allows: measured
# +10 to +13 % over 8 where scores deviate by three or four, the same where they do by one.
LAZY_LOG2_CAPPED = 14
LAZY_LOG2_8BIT = 2  # of e4m3's range, which ends at 448; weights begin at 2^6 then instead of 2^8
LAZY_LOG2_TRUSTING = 3  # where sums of twelve weights tell whether one is larger than that
# Parts of a block's 8-bit weights worth trying. Measured beside each other: up to 128 one is mostly
# ahead, by up to 8 %, at 256 two and three are level.
PARTS = (1, 2, 3)


@dataclass(frozen=True)
class Choice:
    """The free choices of a plan; everything else follows from them and the problem."""

    consumers: int
    block: int
    k_stages: int
    v_stages: int
    take_turns: bool
    q_in_registers: bool
    output_over_q: bool
    softmax: SoftmaxOrder
    promote_blocks: int = 0
    raw_keys: int = 0
    raw_stages: int = 0
    ctas: int = 1
    rolls: bool = False
    stores_rows: bool = False
    sums_stored: bool = False
    shares_output: bool = False
    pairs: bool = False

    @property
    def preference(self) -> float:
        """Higher is better, in keys a block: queries in registers are worth a block 24 keys
        smaller (40 of 8 bits), a third K stage 30 % (d256: 64 keys in three stages beat 80 in two
        by 1.5 %), a second one half; an output that waits for Q's buffer costs 16, as do parts of
        raw V. A third warpgroup is worth any block, and what a window has of its own any other
        choice."""
        keys = self.block * (1.3 if self.k_stages > 2 else self.k_stages / 2)
        in_parts = self.raw_keys if self.promote_blocks else self.raw_keys * self.raw_stages
        keys -= 16 * (0 < in_parts < self.block)
        in_registers = 40 if self.promote_blocks else 24
        return (
            keys
            + in_registers * self.q_in_registers
            - 16 * self.output_over_q
            + 256 * (self.consumers > 2)
            + 512 * self.rolls
            - 64 * self.stores_rows
        )


def own_columns(problem: Problem) -> int:
    """Columns of an output that two warpgroups share, of the one that computes scores: half of the
    boxes of V."""
    return 64 * -(-boxes_of(problem.head_dim_v) // 2)


def ranked_choices(problem: Problem) -> list[Choice]:
    """The choices worth trying, the preferred first."""
    return sorted(choices(problem), key=lambda choice: -choice.preference)


def orders(preferred: SoftmaxOrder) -> Iterator[SoftmaxOrder]:
    """Every order that rescales as lazily as the preferred one."""
    if preferred.parts:
        # Sums of a whole block tell whether maxima have to be found.
        trusting = preferred.lazy_rescale_log2 == LAZY_LOG2_TRUSTING
        yield from (replace(preferred, parts=parts) for parts in PARTS[: 1 if trusting else None])
        return
    ahead = (0, 1, 2) if preferred.lazy_rescale_log2 else (0,)
    for quarters, rescale_first, pair_sums in itertools.product(
        ahead, (False, True), (False, True)
    ):
        if not (quarters and rescale_first):
            yield replace(
                preferred,
                rescale_first=rescale_first,
                pair_sums=pair_sums,
                quarters_ahead=quarters,
            )


def choices(problem: Problem) -> Iterator[Choice]:
    """The choices worth trying: of consumers as many as are fastest, of blocks any from the
    largest that does not spill."""
    if problem.eight_bit:
        yield from choices_8bit(problem)
        return
    consumers = consumers_of(problem)
    light = LIGHT_SCORES.issuperset(problem.scores) and not problem.asks_mask
    take_turns, softmax = takes_turns(problem, consumers), softmax_order(problem)
    # Queries in registers: measured +2 to +5 % at 128; three warpgroups have no room for them, nor
    # have those that ask a mask's program (84 to 104 bytes of spills at 192).
    q_places = [(False, False)] if consumers > 2 else [(False, False), (False, True)]
    if consumers == 2 and light and _largest_dim(problem) <= MAX_HEAD_DIM:
        q_places.insert(0, (True, False))
    # With a bias blocks of 128 keys spill at head dim 8, at 128 beside what needs registers, too.
    much = consumers == 3 or problem.attn_mask or len(problem.scores) > 1
    largest_block = 112 if problem.bias and much else 128
    if problem.bias and problem.head_dim_v > 192:
        largest_block = 80  # a float32 output has room for more in shared memory, and spills
    lined = has_lined_program(problem)
    if problem.asks_mask or (has_program(problem.scores) and not lined):
        largest_block = 112  # whose addresses and quotients spill beside 128 keys
    for block in range(largest_block, SMALLEST_BLOCK - 1, -16):
        # Beside random words 128 keys in two stages measured +8 % over 112 in three, of programs
        # that read lines +5 to +10 %.
        # Of 576 columns beside a bias shared memory holds one stage of the smallest block.
        last = (1,) if _largest_dim(problem) > MAX_HEAD_DIM and block == SMALLEST_BLOCK else ()
        two = problem.dropout or lined
        for k_stages in (*(K_STAGES[consumers] if not two else (2,)), *last):
            for q_in_registers, over_q in q_places:
                if problem.bias and over_q and k_stages > 2:
                    continue  # an output with a place of its own measured +2 % at 128
                choice = Choice(
                    consumers, block, k_stages, 2, take_turns, q_in_registers, over_q, softmax
                )
                if not problem.widens:
                    yield choice
                elif block % RAW_UNIT == 0 and k_stages == 2:
                    for raw_stages in sorted({block // RAW_UNIT, RAW_STAGES}):
                        yield replace(choice, raw_keys=RAW_UNIT, raw_stages=raw_stages)
    if problem.narrow:
        yield from narrow_choices(problem, softmax)


def consumers_of(problem: Problem) -> int:
    """Warpgroups of 64 rows of a tile. Up to head dim 96 three (measured +16 to +36 % over two at
    64, +5 % at 96), of plain scores at 64 four, which look for no maxima (+3 to +8 % over three,
    +16 % at 1k tokens); above, two."""
    if is_plain(problem) and (problem.head_dim_qk, problem.head_dim_v) == (64, 64):
        return 4
    largest = _largest_dim(problem)
    # A bias, a mask's bits and random words together leave three no room for a block of any size.
    lengths = problem.varlen and largest > 80  # whose ends are looked up
    crowded = problem.bias and problem.attn_mask and (problem.dropout or lengths)
    # Nor do warps that copy rows, widen keys or find the boxes of wider pages, which need registers
    # of their own; over pages scores with arithmetic of their own would leave few keys a block.
    light = LIGHT_SCORES.issuperset(problem.scores)
    needy = problem.gather or problem.widens or (problem.paged and (largest > 64 or not light))
    needy = needy or has_program(problem.scores) or problem.asks_mask  # with addresses of its own
    return 3 if largest <= 96 and not (crowded or needy) else 2


def takes_turns(problem: Problem, consumers: int) -> bool:
    """Whether so many warpgroups take turns at the tensor cores. Three do (measured +8 to +13 % at
    64); two run 1 to 2.5 % faster freely at 128, and at 256 the same either way."""
    largest, step = _largest_dim(problem), _softmax_step(problem)
    # With ALiBi two warpgroups do better in turns, too (measured +1 % at 128 full, +2 % at 192),
    # not at 128 causal, where its line precedes the products (-3 %); with a bias in turns (+3 %).
    # Beside a softcap queries in registers would cost the larger block (measured -5 % at 128), and
    # beside a bias (-2 to -3 %).
    light = LIGHT_SCORES.issuperset(problem.scores) or has_lined_program(problem)
    adds = bool(problem.scores) and light and not (step == 128 and "causal" in problem.masks)
    beside = _is_busy(problem) or problem.bias or adds or _is_capped(problem)
    return consumers > 2 or largest > 192 or beside


def has_lined_program(problem: Problem) -> bool:
    """Whether the scores are those of a callable that reads no more than what keys, distances and
    queries have, beside nothing that takes registers."""
    beside = problem.dropout or problem.attn_mask or problem.varlen or problem.gather
    alone = len(problem.scores) == 1 and not (beside or problem.paged)
    return alone and are_light(problem.fragment_digests)


def softmax_order(problem: Problem) -> SoftmaxOrder:
    """The order of a block's softmax in 16 bits that measured fastest."""
    step, busy, capped = _softmax_step(problem), _is_busy(problem), _is_capped(problem)
    softmax = SOFTMAX_ORDERS[step, bool(problem.masks)]
    if step == 128 and busy:
        softmax = replace(softmax, rescale_first=False)
    # Rows that rescale lazily do not keep their true maxima, and neither three consumers nor random
    # words leave registers to keep them beside.
    if problem.max_logit and (capped or step <= 96 or problem.dropout):
        return replace(softmax, lazy_rescale_log2=0)
    if capped:
        return SoftmaxOrder(LAZY_LOG2_CAPPED, False, True, int(step in (128, 192)))
    visits = not problem.attn_mask or (problem.listed and not problem.dropout)
    if step < 256 and visits and (not problem.dropout or (busy and step > 96)):
        quarters = QUARTERS_AHEAD[step, bool(problem.masks)]
        # Under a window of 512 keys at 128 a quarter measured +0.5 to +2.5 % over half, with ALiBi,
        # whose far blocks are passed over, +1 to +4 %; beside warps that copy rows it would spill.
        brief = "window" in problem.masks or problem.scores == ("alibi",)
        if step == 128 and brief and not problem.gather:
            quarters = 1
        return SoftmaxOrder(LAZY_LOG2, False, True, quarters)
    return softmax


def _largest_dim(problem: Problem) -> int:
    return max(problem.head_dim_qk, problem.head_dim_v)


def _softmax_step(problem: Problem) -> int:
    """The head dim up to which orders of a softmax are known, for the problem's."""
    largest = _largest_dim(problem)
    return min((limit for limit, _ in SOFTMAX_ORDERS if largest <= limit), default=256)


def _is_busy(problem: Problem) -> bool:
    """Whether random words or a mask's bits take time between products: at 128 causal dropout
    measured +3 % in turns, a mask +10 % in this order. Both at once, or scores beside them, leave
    no registers for it."""
    return problem.dropout != problem.attn_mask and not problem.scores


def _is_capped(problem: Problem) -> bool:
    """Whether a lone softcap bends its scores within the exponentials."""
    return problem.scores == ("softcap",) and not (problem.dropout or problem.attn_mask)


def narrow_choices(problem: Problem, softmax: SoftmaxOrder) -> Iterator[Choice]:
    """Under a window: free warpgroups, as many as registers hold, each of which visits the blocks
    of 64 keys that its rows see. Measured over those of whole tiles, at 128, 512, 1024 and 2048
    keys: +59, +35, +20 and +17 % at 64, +52, +37, +24 and +15 % at 96, +17, +10, +7 and +4 % at
    128, +12, +13, +9 and +6 % at 192, +27, +22, +10 and +6 % at 256, there over outputs that wait
    for Q's buffer by 2 to 7 %."""
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    if not has_narrow(largest, problem.scores) or boxes_of(largest) not in NARROW_STAGES:
        return
    few = largest <= 192 and problem.head_dim_v <= 128
    consumers = 4 if largest <= 64 else 3 if few else 2
    stages = NARROW_STAGES[boxes_of(largest)]
    for stores_rows in (False, True):
        yield Choice(
            *(consumers, 64, *stages, False, False, False, softmax),
            rolls=True,
            stores_rows=stores_rows,
        )


def has_narrow(largest: int, scores: Iterable[str]) -> bool:
    """Whether a window has choices of its own at these head dims: up to 64 columns they are four
    warpgroups, for which a softcap leaves no registers."""
    return largest > 64 or LIGHT_SCORES.issuperset(scores)


def is_plain(problem: Problem) -> bool:
    """Whether scores are products of dense operands and no more, and no maximum is asked for."""
    dense = (problem.q_seq, problem.kv_seq, problem.kv_fetch) == ("dense", "dense", "tma")
    beside = problem.scores or problem.dropout or problem.attn_mask or problem.max_logit
    return dense and problem.dtype_kv == problem.dtype_q and not beside


def choices_8bit(problem: Problem) -> Iterator[Choice]:
    """Two consumers; blocks of whole 32-key steps; raw V of whole blocks, or less where the rest
    needs the room (measured at 128: 7 % slower)."""
    softmax = SoftmaxOrder(0, rescale_first=True, pair_sums=True)
    # Scores and random words need registers, and true maxima are not known lazily.
    busy = set(problem.scores) > {TOKEN_SCALES} or (problem.scores and not problem.token_scales)
    if not (busy or problem.max_logit or problem.dropout or problem.attn_mask):
        parts_8bit = 1 if problem.head_dim_v <= 128 else 2
        softmax = replace(softmax, lazy_rescale_log2=LAZY_LOG2_8BIT, parts=parts_8bit)
    # Three have room for few columns of V, and only for few keys of them; a thread that loads
    # everything has none for lengths.
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    few = THREE_FROM <= problem.head_dim_v and largest <= 128 and softmax.parts
    if few and not (problem.varlen or problem.token_scales):
        trusting = replace(softmax, lazy_rescale_log2=LAZY_LOG2_TRUSTING)
        for block in (96, 64):
            three = Choice(
                3, block, 2, 2, False, False, False, trusting if problem.masks else softmax
            )
            promote_blocks = PROMOTE_KEYS[3] // block
            yield replace(
                three, promote_blocks=promote_blocks, raw_keys=block, raw_stages=RAW_STAGES
            )
    # Scales of tokens leave none beside queries of many columns but in blocks of few keys.
    q_places = (False,) if problem.token_scales and largest > 128 else (True, False)
    for block in range(128 if problem.bias or problem.token_scales else 192, 0, -32):
        parts = (block,) if block == RAW_UNIT else (block, RAW_UNIT)
        for q_in_registers, raw_keys in itertools.product(q_places, parts):
            plain = Choice(2, block, 2, 2, False, q_in_registers, False, softmax)
            in_registers = problem.head_dim_v <= TOTAL_COLUMNS
            promote_blocks = 1 if in_registers else PROMOTE_KEYS[2] // block
            raw = replace(plain, raw_keys=raw_keys, raw_stages=RAW_STAGES)
            yield replace(raw, promote_blocks=promote_blocks)
