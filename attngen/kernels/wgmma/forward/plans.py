"""Hopper: limits, feasible plans, and the heuristics with what justified them.

Figures marked `measured` are from an H200 at 700 W; docs/results/forward.json has what the chosen
plans reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import DEFAULT
from ...base import (
    Pipeline,
    Plan,
    Schedule,
    SoftmaxOrder,
    Tile,
    lay_out,
    order_bytes,
    score_tile_bytes,
)

TARGET = DEFAULT
ARCH = TARGET.name
SMEM_BYTES = TARGET.cta_smem_bytes
JOB_BYTES = 24  # struct Job of the forward, and more of queries and of keys whose lengths vary
JOB_BYTES_QUERIES, JOB_BYTES_KEYS = 16, 8
JOB_BYTES_CUT = 8  # and of tiles of two sizes
BARRIER_BYTES = 8
ONES_BYTES = 8 * 128  # columns of ones behind V's, transposed
DROP_WORD_BYTES = 20  # a key of a warp's block: struct DropWords
# Tensor cores cut 8-bit products to the bits of the running sum. Up to so many columns of V each
# block's sum joins a total in registers (measured at 64: 541 and 534 TFLOP/s, full and causal, a
# mean every 1024 keys 501 and 518); above, sums of so many keys, by the number of consumers, join
# a mean in shared memory: 1024 lose 1.5 % of sums of one sign and 1 to 7 % of the speed (512: 0.7
# and 7 to 13 %). Three are 2 to 5 % faster with 1920, which lose 3 %, than with 960.
TOTAL_COLUMNS = 64
PROMOTE_KEYS = {2: 1024, 3: 1920}
RAW_STAGES = 2  # buffers of 8-bit V before it is transposed
RAW_UNIT = 32  # keys, the fewest that are transposed at a time
ROWS_PER_CONSUMER = 64
# Registers a thread of the producer and of a consumer, by the numbers of consumers and of an SM's
# CTAs: setmaxnreg moves the 256 or 160 of a launch (2 warpgroups, two or three CTAs), 504 (3),
# 512 (4) or 480 (5) between roles. Beside two consumers, of which none needs more than 232, a
# producer of 24 spills in some head-dim pairs.
REGISTERS = {
    (1, 2): (40, 216),
    (1, 3): (24, 136),
    (2, 1): (40, 232),
    (3, 1): (32, 160),
    (4, 1): (32, 112),
}
# Where the producer's warps copy rows themselves, beside two consumers.
GATHER_REGISTERS = (56, 224)
# Two consumers beside a producer and a transposer, 512 in all. A transposer whose warps have
# unequal shares of V's columns (False) spills with 32.
REGISTERS_8BIT = {True: (32, 224), False: (40, 216)}
# Three beside one warpgroup that does both, 512 in all: from so many columns of V on.
REGISTERS_8BIT_THREE = (32, 160)
THREE_FROM = 112
REGISTERS_WIDENED = (40, 216)  # the same beside a warpgroup that widens K and V
LIGHT_SCORES = frozenset({"alibi"})  # a multiply-add an element needs no registers
SMALLEST_BLOCK = 32
K_STAGES = {2: (3, 2), 3: (2,), 4: (4,)}
NARROW_STAGES = {1: (6, 5), 2: (4, 4), 3: (3, 2), 4: (3, 2)}  # of K and of V, by boxes of a row
# Operands in registers (output, scores, packed weights, queries) that leave room for addresses and
# row state, by consumers and CTAs, and what features (`_features`) take from them where all of
# a row's are there: what compiles without spills from head dim 8 to 256.
OPERANDS = {(1, 2): 188, (1, 3): 128, (2, 1): 204, (3, 1): 132, (4, 1): 80}
OPERANDS_TAKEN = (
    ("heavy", 16),
    ("attn_mask", 12),
    ("copies", 8),  # that the producer has instead
    ("widens", 16),
    ("bias three", 4),
    ("bias three varlen", 4),
    ("bias three several", 16),
    ("bias gather plain", 16),
    ("bias masks wide", 16),
    ("crowded lengths", 16),
    ("paged alibi masked", 4),
    ("gather random wide", 4),
    ("smallest", -16),  # what spills in a block of so few keys has no kernel at all; nothing does
)
OPERANDS_RANDOM = 192  # of queries among them, beside random words; at 196 some spill
# Where a producer that may have to copy a bias itself needs more: beside two consumers where
# lengths vary, beside three always.
BIAS_ROLES = {2: (56, 224), 3: (56, 152)}
# Groups of 32 heads leave four SMs a head to share its keys, of 64 MB still mostly hit L2: measured
# best or within 1 % from 1k to 16k tokens; smaller groups lose to the imbalance at their ends.
CAUSAL_SCHEDULE = Schedule(True, True, kv_group_bytes=64 << 20, group_heads=32, tail_share=4)
# Equal tiles need no order but neighbours on one head; drawn from a counter they still measured
# +2 to +3 % at 512 and 1024 tokens over a fixed stride, and the same beyond.
FULL_SCHEDULE = Schedule(True, False, kv_group_bytes=0, group_heads=1, tail_share=0)
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

    @property
    def preference(self) -> float:
        """Higher is better, in keys a block: queries in registers are worth a block 24 keys
        smaller (40 of 8 bits), a third K stage 30 % (d256: 64 keys in three stages beat 80 in two
        by 1.5 %), an output that waits for Q's buffer costs 16, as do parts of raw V. A third
        warpgroup is worth any block, and what a window has of its own any other choice."""
        keys = self.block * (1.3 if self.k_stages > 2 else 1.0)
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


def feasible(problem: Problem) -> Iterator[Plan]:
    """Every plan that fits shared memory and registers, the preferred first, and that one with
    its softmax in every order next."""
    ranked = ranked_choices(problem)
    found: set[Plan] = set()  # of which several choices may make one
    for choice in ranked:
        if not (plan := make_plan(problem, choice)) or plan in found:
            continue
        others = orders(choice.softmax) if not found else ()
        ordered = (make_plan(problem, replace(choice, softmax=softmax)) for softmax in others)
        for each in filter(None, (plan, *ordered)):
            if each not in found:
                found.add(each)
                yield each


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
    """The choices worth trying. Up to head dim 96 three warpgroups of 64 rows (measured +16 to
    +36 % over two at 64, +5 % at 96) that take turns (+8 to +13 % at 64), of plain scores at 64
    four, which look for no maxima (+3 to +8 % over three, +16 % at 1k tokens); above, two, which
    at 128 run 1 to 2.5 % faster freely and at 256 the same either way."""
    if problem.eight_bit:
        yield from choices_8bit(problem)
        return
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    # A bias, a mask's bits and random words together leave three no room for a block of any size.
    lengths = problem.varlen and largest > 80  # whose ends are looked up
    crowded = problem.bias and problem.attn_mask and (problem.dropout or lengths)
    # Nor do warps that copy rows, widen keys or find the boxes of wider pages, which need registers
    # of their own; over pages scores with arithmetic of their own would leave few keys a block.
    light = LIGHT_SCORES.issuperset(problem.scores)
    needy = problem.gather or problem.widens or (problem.paged and (largest > 64 or not light))
    consumers = 3 if largest <= 96 and not (crowded or needy) else 2
    if is_plain(problem) and (problem.head_dim_qk, problem.head_dim_v) == (64, 64):
        consumers = 4
    # With ALiBi two warpgroups do better in turns, too (measured +1 % at 128 full, +2 % at 192),
    # not at 128 causal, where its line precedes the products (-3 %); with a bias in turns (+3 %).
    # Beside a softcap queries in registers would cost the larger block (measured -5 % at 128), and
    # beside a bias (-2 to -3 %).
    # So they do where random words or a mask's bits take time between products: at 128 causal
    # dropout measured +3 % in turns, a mask +10 % in this order.
    # Both at once, or scores beside them, leave no registers for it.
    busy = problem.dropout != problem.attn_mask and not problem.scores
    step = min((limit for limit, _ in SOFTMAX_ORDERS if largest <= limit), default=256)
    adds = bool(problem.scores) and light and not (step == 128 and "causal" in problem.masks)
    # A lone softcap bends its scores within the exponentials.
    capped = problem.scores == ("softcap",) and not (problem.dropout or problem.attn_mask)
    take_turns = consumers > 2 or largest > 192 or busy or problem.bias or adds or capped
    softmax = SOFTMAX_ORDERS[step, bool(problem.masks)]
    if step == 128 and busy:
        softmax = replace(softmax, rescale_first=False)
    # Rows that rescale lazily do not keep their true maxima, and neither three consumers nor random
    # words leave registers to keep them beside.
    if problem.max_logit and (capped or step <= 96 or problem.dropout):
        softmax = replace(softmax, lazy_rescale_log2=0)
    elif capped:
        softmax = SoftmaxOrder(LAZY_LOG2_CAPPED, False, True, int(step in (128, 192)))
    elif step < 256 and not problem.attn_mask and (not problem.dropout or (busy and step > 96)):
        quarters = QUARTERS_AHEAD[step, bool(problem.masks)]
        # Under a window of 512 keys at 128 a quarter measured +0.5 to +2.5 % over half, with ALiBi,
        # whose far blocks are passed over, +1 to +4 %; beside warps that copy rows it would spill.
        brief = "window" in problem.masks or problem.scores == ("alibi",)
        if step == 128 and brief and not problem.gather:
            quarters = 1
        softmax = SoftmaxOrder(LAZY_LOG2, False, True, quarters)
    # Queries in registers: measured +2 to +5 % at 128; three warpgroups have no room for them.
    q_places = [(False, False)] if consumers > 2 else [(False, False), (False, True)]
    if consumers == 2 and light:
        q_places.insert(0, (True, False))
    # With a bias blocks of 128 keys spill at head dim 8, at 128 beside what needs registers, too.
    much = consumers == 3 or problem.attn_mask or len(problem.scores) > 1
    largest_block = 112 if problem.bias and much else 128
    if problem.bias and problem.head_dim_v > 192:
        largest_block = 80  # a float32 output has room for more in shared memory, and spills
    for block in range(largest_block, SMALLEST_BLOCK - 1, -16):
        # Beside random words 128 keys in two stages measured +8 % over 112 in three.
        for k_stages in K_STAGES[consumers] if not problem.dropout else (2,):
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


def narrow_choices(problem: Problem, softmax: SoftmaxOrder) -> Iterator[Choice]:
    """Under a window: free warpgroups, as many as registers hold, each of which visits the blocks
    of 64 keys that its rows see. Measured over those of whole tiles, at 128, 512, 1024 and 2048
    keys: +59, +35, +20 and +17 % at 64, +52, +37, +24 and +15 % at 96, +17, +10, +7 and +4 % at
    128, +12, +13, +9 and +6 % at 192, +27, +22, +10 and +6 % at 256, there over outputs that wait
    for Q's buffer by 2 to 7 %."""
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    if not has_narrow(largest, problem.scores):
        return
    few = largest <= 192 and problem.head_dim_v <= 128
    consumers = 4 if largest <= 64 else 3 if few else 2
    stages = NARROW_STAGES[_boxes(largest)]
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
    if not (problem.scores or problem.max_logit or problem.dropout or problem.attn_mask):
        parts_8bit = 1 if problem.head_dim_v <= 128 else 2
        softmax = replace(softmax, lazy_rescale_log2=LAZY_LOG2_8BIT, parts=parts_8bit)
    # Three have room for few columns of V, and only for few keys of them; a thread that loads
    # everything has none for lengths.
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    few = THREE_FROM <= problem.head_dim_v and largest <= 128 and softmax.parts
    if few and not problem.varlen:
        trusting = replace(softmax, lazy_rescale_log2=LAZY_LOG2_TRUSTING)
        for block in (96, 64):
            three = Choice(
                3, block, 2, 2, False, False, False, trusting if problem.masks else softmax
            )
            promote_blocks = PROMOTE_KEYS[3] // block
            yield replace(
                three, promote_blocks=promote_blocks, raw_keys=block, raw_stages=RAW_STAGES
            )
    for block in range(192, 0, -32):
        parts = (block,) if block == RAW_UNIT else (block, RAW_UNIT)
        for q_in_registers, raw_keys in itertools.product((True, False), parts):
            plain = Choice(2, block, 2, 2, False, q_in_registers, False, softmax)
            in_registers = problem.head_dim_v <= TOTAL_COLUMNS
            promote_blocks = 1 if in_registers else PROMOTE_KEYS[2] // block
            raw = replace(plain, raw_keys=raw_keys, raw_stages=RAW_STAGES)
            yield replace(raw, promote_blocks=promote_blocks)


def make_plan(problem: Problem, choice: Choice) -> Plan | None:
    """The plan of these choices; None where it does not fit."""
    tile = Tile(ROWS_PER_CONSUMER * choice.consumers, choice.block)
    registers = operand_registers(problem, choice)
    schedule = CAUSAL_SCHEDULE if problem.masks else FULL_SCHEDULE
    # Where V is transposed as well, its registers leave no room for what finds the order of few.
    orders_few = problem.varlen and not problem.eight_bit
    order = {"Order": order_bytes(schedule.tail_share)} if orders_few else {}
    regions = lay_out(smem_sizes(problem, tile, choice), order)
    smem_bytes = regions[-1].offset + regions[-1].bytes
    if registers > operand_limit(problem, choice) or smem_bytes > smem_room(choice):
        return None
    if choice.output_over_q and (
        choice.q_in_registers  # the next tile's queries are already on their way there
        or stores_directly(problem)
        or (not problem.eight_bit and _boxes(problem.head_dim_v) > _boxes(problem.head_dim_qk))
    ):
        return None
    between = problem.eight_bit or problem.widens  # a warpgroup that transposes or widens
    producer, consumer = role_registers(problem, choice)
    return Plan(
        arch=ARCH,
        family="sm90_fwd",
        tile=tile,
        pipeline=Pipeline(
            consumers=choice.consumers,
            k_stages=choice.k_stages,
            v_stages=choice.v_stages,
            raw_stages=choice.raw_stages,
            raw_keys=choice.raw_keys,
            producer_registers=producer,
            consumer_registers=consumer,
            take_turns=choice.take_turns,
            q_in_registers=choice.q_in_registers,
            output_over_q=choice.output_over_q,
        ),
        schedule=schedule,
        softmax=choice.softmax,
        promote_blocks=choice.promote_blocks,
        smem=regions,
        smem_bytes=smem_bytes,
        threads=128 * (choice.consumers + 1 + (between and choice.consumers < 3)),
        operand_registers=registers,
        why=explain(problem, choice, schedule, registers, smem_bytes),
    )


def operand_registers(problem: Problem, choice: Choice) -> int:
    """Registers a consumer thread holds at once: output, a block's scores, its weights, and the
    queries where they stay in registers."""
    size = DTYPE_BYTES[problem.dtype_q]
    queries = -(-problem.head_dim_qk * size // 32) * 4 if choice.q_in_registers else 0
    sums = problem.head_dim_v // 2 * (2 if choice.promote_blocks == 1 else 1)
    return sums + choice.block // 2 + choice.block * size // 8 + queries


def operand_limit(problem: Problem, choice: Choice) -> int:
    """Registers a thread has for its operands."""
    if problem.eight_bit:
        consumer = role_registers(problem, choice)[1]
        if problem.scores:  # at 152 of 216 some spill, at 148 none
            return consumer - (64 if consumer > 216 else 68)
        wide = max(problem.head_dim_qk, problem.head_dim_v) > 128  # some spill at 192 of 224
        return consumer - (36 if wide else 32)
    features = _features(problem, choice)
    taken = {these: count for these, count in OPERANDS_TAKEN if features.issuperset(these.split())}
    limit = OPERANDS[choice.consumers, choice.ctas] - sum(taken.values())
    if problem.dropout and choice.q_in_registers:
        limit = min(limit, OPERANDS_RANDOM - taken.get("crowded lengths", 0))
    return limit


def _features(problem: Problem, choice: Choice) -> frozenset[str]:
    """What takes registers beside 16-bit operands. Heavy: scores that are more than a multiply-add;
    copies: a producer that has more registers to copy rows or a bias itself; lengths: told on the
    device, or a window's two ends; crowded: what finds no room for these."""
    light = LIGHT_SCORES.issuperset(problem.scores)
    bits = problem.dropout or problem.attn_mask
    wide = problem.head_dim_v > 192
    of_bias = problem.bias and (problem.varlen or choice.consumers == 3)
    features = {
        "heavy": not light,
        "several": len(problem.scores) > 1,
        "alibi": problem.scores == ("alibi",),
        "bias": problem.bias,
        "attn_mask": problem.attn_mask,
        "random": problem.dropout,
        "plain": not bits,
        "masked": bool(problem.masks),
        "masks": len(problem.masks) > 1,
        "gather": problem.gather,
        # Beside random words at 256, whose limits have room to spare, no block would fit.
        "copies": (problem.gather or of_bias) and not (problem.dropout and wide),
        "paged": problem.paged,
        "widens": problem.widens,
        "varlen": problem.varlen,
        "lengths": (problem.varlen or "window" in problem.masks) and not choice.rolls,
        "crowded": bits
        or problem.scores == ("softcap",)
        or (problem.paged and not light)
        or (problem.widens and wide),
        "three": choice.consumers == 3,
        "wide": wide,
        "smallest": choice.block == SMALLEST_BLOCK
        and not (choice.q_in_registers or problem.widens),
    }
    return frozenset(name for name, is_there in features.items() if is_there)


def role_registers(problem: Problem, choice: Choice) -> tuple[int, int]:
    """Registers a thread of the producer (and transposer) and of a consumer."""
    if problem.eight_bit:
        unequal = problem.head_dim_v % 64 != 0
        return REGISTERS_8BIT_THREE if choice.consumers == 3 else REGISTERS_8BIT[not unequal]
    if problem.widens:
        return REGISTERS_WIDENED
    if problem.bias and (problem.varlen or choice.consumers == 3):
        return BIAS_ROLES[choice.consumers]
    return GATHER_REGISTERS if problem.gather else REGISTERS[choice.consumers, choice.ctas]


def smem_room(choice: Choice) -> int:
    """Bytes of shared memory that a CTA may use."""
    return TARGET.smem_share(choice.ctas)


def stores_directly(problem: Problem) -> bool:
    """Whether the output goes from registers to memory, without the copy engine."""
    return problem.dtype_o == "fp32" or problem.gather


def cuts_tiles(problem: Problem, choice: Choice) -> bool:
    """Whether tiles, which cost the same, are of two sizes, so that a last round is short."""
    return problem.eight_bit and choice.consumers == 3 and not problem.masks


def smem_sizes(problem: Problem, tile: Tile, choice: Choice) -> dict[str, int]:
    """Bytes of each shared-memory region; head dims round up to whole 128-byte boxes."""
    row_bytes_qk = 128 * _boxes(problem.head_dim_qk, DTYPE_BYTES[problem.dtype_q])
    size_v = DTYPE_BYTES[problem.dtype_q if problem.widens else problem.dtype_kv]
    row_bytes_v = 128 * _boxes(problem.head_dim_v, size_v)
    row_bytes_o = 128 * _boxes(problem.head_dim_v, DTYPE_BYTES[problem.dtype_o])
    if choice.promote_blocks > 1:  # the float16 means lie where the output is staged
        row_bytes_o = max(row_bytes_o, 128 * _boxes(problem.head_dim_v, 2))
    staged = not (stores_directly(problem) or choice.output_over_q or choice.stores_rows)
    raw_stages = choice.raw_stages * (2 if problem.widens else 1)
    barriers = 2 * (choice.consumers + choice.k_stages + choice.v_stages + raw_stages + 1)
    barriers += problem.paged  # V's last block, which is cleared behind the sequence's end
    barriers += 2 * choice.consumers * problem.bias
    job = JOB_BYTES + JOB_BYTES_QUERIES * (problem.q_seq != "dense")
    job += JOB_BYTES_KEYS * (problem.kv_seq != "dense")
    job += JOB_BYTES_CUT * cuts_tiles(problem, choice)
    stage_v = tile.n * row_bytes_v
    if problem.eight_bit:  # transposed: a row a column of V, 128 keys a box
        stage_v = problem.head_dim_v * 128 * -(-tile.n // 128)
        stage_v += ONES_BYTES * choice.sums_stored
    return {
        "Q": tile.m * (max(row_bytes_qk, row_bytes_o) if choice.output_over_q else row_bytes_qk),
        "K": choice.k_stages * tile.n * row_bytes_qk,
        "V": choice.v_stages * stage_v,
        **({"Raw": choice.raw_stages * choice.raw_keys * row_bytes_v} if problem.eight_bit else {}),
        **(raw_sizes(problem, choice) if problem.widens else {}),
        **({"O": tile.m * row_bytes_o} if staged else {}),
        **({"Words": choice.consumers * 4 * tile.n * DROP_WORD_BYTES} if problem.dropout else {}),
        **({"Bias": choice.consumers * score_tile_bytes(64, tile.n)} if problem.bias else {}),
        "Barriers": BARRIER_BYTES * barriers,
        "Job": job,
    }


def raw_sizes(problem: Problem, choice: Choice) -> dict[str, int]:
    """Bytes of what K and V are widened from."""
    dims = {"RawK": problem.head_dim_qk, "RawV": problem.head_dim_v}
    return {
        name: choice.raw_stages * choice.raw_keys * 128 * _boxes(d, 1) for name, d in dims.items()
    }


def explain(
    problem: Problem, choice: Choice, schedule: Schedule, registers: int, smem_bytes: int
) -> tuple[str, ...]:
    """The plan's choices in prose, for people."""
    keys = choice.promote_blocks * choice.block
    place = "total in registers" if choice.promote_blocks == 1 else "mean in shared memory"
    promoted = (f"sums of 8-bit products join a {place} every {keys} keys",) if keys else ()
    return (
        "1 consumer warpgroup of 64 query rows shares the tensor cores with other CTAs'"
        if choice.consumers == 1
        else f"{choice.consumers} consumer warpgroups of 64 query rows "
        + ("take turns at the tensor cores" if choice.take_turns else "share the tensor cores")
        + (", and visit each the blocks that its rows see" if choice.rolls else ""),
        f"{choice.block} keys a block: {registers} of {operand_limit(problem, choice)} operand "
        "registers a thread",
        "queries in registers: each product reads less shared memory"
        if choice.q_in_registers
        else "queries in shared memory: registers hold a larger block or output instead",
        f"{choice.k_stages} K and {choice.v_stages} V stages: {smem_bytes} of {smem_room(choice)} "
        f"bytes of shared memory, {choice.ctas} CTA{'s' if choice.ctas > 1 else ''} an SM",
        "threads copy rows that the copy engine cannot, and store those of the output"
        if problem.gather
        else "output from registers to memory: stages have its place"
        if choice.stores_rows
        else "output staged over Q: its own buffer would not fit"
        if choice.output_over_q
        else "output has a place of its own, so that the next tile's Q loads early",
        explain_order(choice.softmax)
        + (
            " and a key is hidden" if choice.softmax.lazy_rescale_log2 == LAZY_LOG2_TRUSTING else ""
        ),
        *promoted,
        "tiles drawn from a counter, "
        + ("longest rows first" if schedule.longest_first else "one head after another")
        + (", those of a last round of 128 rows" if cuts_tiles(problem, choice) else ""),
    )


def explain_order(order: SoftmaxOrder) -> str:
    """The order of a block's softmax in prose."""
    if order.parts:
        slack = order.lazy_rescale_log2
        return f"weights in {order.parts} parts, maxima raised where outgrown by 2^{slack}"
    place = "before" if order.rescale_first else "after"
    lazily = ", lazily" if order.lazy_rescale_log2 else ""
    ahead = order.quarters_ahead
    share = f"; {ahead} of 4 parts of these precede the wait for the product" if ahead else ""
    return f"output rescaled {place} a block's exponentials{lazily}{share}"


def _boxes(head_dim: int, element_bytes: int = 2) -> int:
    return -(-head_dim * element_bytes // 128)
