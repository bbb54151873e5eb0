"""Plans of a forward: from a choice to registers and shared memory, where it fits.

Figures marked `measured` are from an H200 at 700 W; docs/results/forward.json has what the chosen
plans reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....fragments.score_lines import lines_in
from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import Schedule, Tile, lay_out, order_bytes, score_tile_bytes
from ..shared import BARRIER_BYTES, DRAWN_BYTES, LIGHT_SCORES, boxes_of
from .choices import (
    LAZY_LOG2_TRUSTING,
    SMALLEST_BLOCK,
    Choice,
    orders,
    own_columns,
    ranked_choices,
)
from .plan import FORWARD, WIDE, Pipeline, Plan, SoftmaxOrder

JOB_BYTES = 24  # struct Job of the forward, and more of queries and of keys whose lengths vary
JOB_BYTES_QUERIES, JOB_BYTES_KEYS = 16, 8
JOB_BYTES_CUT = 8  # and of tiles of two sizes
VISIT_BYTES = 4  # a stage of keys: which block comes behind it
ONES_BYTES = 8 * 128  # columns of ones behind V's, transposed
DROP_WORD_BYTES = 20  # a key of a warp's block: struct DropWords
TOKEN_SCALE_BYTES = 12  # a key of a warp's block: struct TokenScales
ROWS_PER_CONSUMER, ROWS_PER_WARP = 64, 16
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
# unequal shares of V's columns (False) spills with 32, as do roles beside scales of tokens, a
# producer that copies a bias with 40.
REGISTERS_8BIT = {True: (32, 224), False: (40, 216)}
REGISTERS_8BIT_BIAS = (48, 208)
# Three beside one warpgroup that does both, 512 in all.
REGISTERS_8BIT_THREE = (32, 160)
# A producer that may copy rows or a bias, a consumer, and what has the rest of its output, of 504.
SHARED_REGISTERS, REST_REGISTERS = (56, 248), 200
REGISTERS_WIDENED = (40, 216)  # the same beside a warpgroup that widens K and V
# Operands in registers (output, scores, packed weights, queries) that leave room for addresses and
# row state, by consumers and CTAs, and what features (`_features`) take from them where all of
# a row's are there: what compiles without spills from head dim 8 to 256.
OPERANDS = {(1, 2): 188, (1, 3): 128, (2, 1): 204, (3, 1): 132, (4, 1): 80}
# Where a second warpgroup has the rest of the output; beside heavy scores; and three features.
SHARED_OPERANDS, SHARED_HEAVY, SHARED_SEVERAL = 212, 172, 152
OPERANDS_TAKEN = (
    ("heavy", 16),
    ("attn_mask", 12),
    ("copies", 8),  # that the producer has instead
    ("widens", 16),
    ("bias three", 4),
    ("bias three varlen", 4),
    ("bias three several", 16),
    ("bias gather plain", 16),
    ("ends gather plain", 8),
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


def feasible(problem: Problem, target: Target) -> Iterator[Plan]:
    """Every plan that fits shared memory and registers, the preferred first, and that one with
    its softmax in every order next."""
    ranked = ranked_choices(problem)
    found: set[Plan] = set()  # of which several choices may make one
    for choice in ranked:
        if not (plan := make_plan(problem, choice, target)) or plan in found:
            continue
        others = orders(choice.softmax) if not found else ()
        ordered = (make_plan(problem, replace(choice, softmax=each), target) for each in others)
        for each in filter(None, (plan, *ordered)):
            if each not in found:
                found.add(each)
                yield each


def make_plan(problem: Problem, choice: Choice, target: Target) -> Plan | None:
    """The plan of these choices; None where it does not fit the target."""
    tile = Tile(ROWS_PER_CONSUMER * choice.consumers * (1 + choice.pairs), choice.block)
    registers = operand_registers(problem, choice)
    # Of masks made before nobody here knows which tiles are long; most that hide later keys do so
    # as a causal one does.
    schedule = CAUSAL_SCHEDULE if problem.masks or problem.listed else FULL_SCHEDULE
    # Where V is transposed as well, its registers leave no room for what finds the order of few.
    orders_few = problem.varlen and not problem.eight_bit
    order = {"Order": order_bytes(schedule.tail_share)} if orders_few else {}
    drawn = {"Drawn": DRAWN_BYTES} if choice.pairs else {}
    visits = {"Visits": VISIT_BYTES * choice.k_stages} if problem.listed else {}
    regions = lay_out(smem_sizes(problem, tile, choice), {**drawn, **order, **visits})
    smem_bytes = regions[-1].offset + regions[-1].bytes
    if registers > operand_limit(problem, choice) or smem_bytes > target.smem_share(choice.ctas):
        return None
    if choice.output_over_q and (
        choice.q_in_registers  # the next tile's queries are already on their way there
        or stores_directly(problem)
        or (not problem.eight_bit and boxes_of(problem.head_dim_v) > boxes_of(problem.head_dim_qk))
    ):
        return None
    between = problem.eight_bit or problem.widens  # a warpgroup that transposes or widens
    producer, consumer = role_registers(problem, choice)
    return Plan(
        arch=target.name,
        family=WIDE if choice.shares_output else FORWARD,
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
        threads=128
        * (choice.consumers + 1 + choice.shares_output + (between and choice.consumers < 3)),
        operand_registers=registers,
        why=explain(problem, choice, registers, smem_bytes, target.smem_share(choice.ctas)),
    )


def operand_registers(problem: Problem, choice: Choice) -> int:
    """Registers a consumer thread holds at once: output, a block's scores, its weights, and the
    queries where they stay in registers."""
    size = DTYPE_BYTES[problem.dtype_q]
    queries = -(-problem.head_dim_qk * size // 32) * 4 if choice.q_in_registers else 0
    columns = own_columns(problem) if choice.shares_output else problem.head_dim_v
    sums = columns // 2 * (2 if choice.promote_blocks == 1 else 1)
    return sums + choice.block // 2 + choice.block * size // 8 + queries


def operand_limit(problem: Problem, choice: Choice) -> int:
    """Registers a thread has for its operands."""
    if problem.eight_bit:
        consumer = role_registers(problem, choice)[1]
        if problem.bias:  # 128 rows of output leave room for no larger a block than the smallest
            heavy, drawn = "softcap" in problem.scores, problem.dropout or problem.attn_mask
            beside = (88 if heavy else 68) + 8 * drawn
            return consumer - (60 if choice.block == SMALLEST_BLOCK else beside)
        if problem.token_scales:
            return consumer - (72 if problem.attn_mask and problem.dropout else 64)
        if problem.scores:  # at 152 of 216 some spill, at 148 none
            return consumer - (64 if consumer > 216 else 68)
        wide = max(problem.head_dim_qk, problem.head_dim_v) > 128  # some spill at 192 of 224
        if wide:
            return consumer - (52 if problem.attn_mask or problem.dropout else 36)
        looked_up = problem.attn_mask and (problem.varlen or problem.masks)
        return consumer - (48 if looked_up else 32)
    features = _features(problem, choice)
    taken = {these: count for these, count in OPERANDS_TAKEN if features.issuperset(these.split())}
    if choice.shares_output:
        several = features & {"heavy", "bias", "attn_mask", "random", "lengths"}
        copies_bits = features >= {"gather", "lengths"} and "plain" not in features
        copies_heavy = features >= {"gather", "lengths", "heavy"}
        if len(several) > 2 or copies_bits or copies_heavy:
            return SHARED_SEVERAL
        return SHARED_HEAVY if "heavy" in features else SHARED_OPERANDS
    limit = OPERANDS[choice.consumers, choice.ctas] - sum(taken.values())
    if problem.dropout and choice.q_in_registers:
        limit = min(limit, OPERANDS_RANDOM - taken.get("crowded lengths", 0))
    return limit


def _features(problem: Problem, choice: Choice) -> frozenset[str]:
    """Features that take registers beside 16-bit operands.

    heavy: scores that are more than a multiply-add; copies: a producer that has more registers to
    copy rows or a bias itself; lengths: told on the device, or a window's two ends; ends: both;
    crowded: what finds no room for these.
    """
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
        "ends": problem.varlen and "window" in problem.masks,
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
        equal = problem.head_dim_v % 64 == 0 and not problem.token_scales
        if problem.bias:
            return REGISTERS_8BIT_BIAS
        return REGISTERS_8BIT_THREE if choice.consumers == 3 else REGISTERS_8BIT[equal]
    if problem.widens:
        return REGISTERS_WIDENED
    if choice.shares_output:
        return SHARED_REGISTERS
    if problem.bias and (problem.varlen or choice.consumers == 3):
        return BIAS_ROLES[choice.consumers]
    return GATHER_REGISTERS if problem.gather else REGISTERS[choice.consumers, choice.ctas]


def stores_directly(problem: Problem) -> bool:
    """Whether the output goes from registers to memory, without the copy engine."""
    return problem.dtype_o == "fp32" or problem.gather


def cuts_tiles(problem: Problem, choice: Choice) -> bool:
    """Whether tiles, which cost the same, are of two sizes, so that a last round is short."""
    return problem.eight_bit and choice.consumers == 3 and not problem.masks


def smem_sizes(problem: Problem, tile: Tile, choice: Choice) -> dict[str, int]:
    """Bytes of each shared-memory region; head dims round up to whole 128-byte boxes."""
    row_bytes_qk = 128 * boxes_of(problem.head_dim_qk, DTYPE_BYTES[problem.dtype_q])
    size_v = DTYPE_BYTES[problem.dtype_q if problem.widens else problem.dtype_kv]
    row_bytes_v = 128 * boxes_of(problem.head_dim_v, size_v)
    row_bytes_o = 128 * boxes_of(problem.head_dim_v, DTYPE_BYTES[problem.dtype_o])
    if choice.promote_blocks > 1:  # the float16 means lie where the output is staged
        row_bytes_o = max(row_bytes_o, 128 * boxes_of(problem.head_dim_v, 2))
    staged = not (stores_directly(problem) or choice.output_over_q or choice.stores_rows)
    raw_stages = choice.raw_stages * (2 if problem.widens else 1)
    barriers = 2 * (choice.consumers + choice.k_stages + choice.v_stages + raw_stages + 1)
    barriers += problem.paged  # V's last block, which is cleared behind the sequence's end
    barriers += 2 * choice.consumers * problem.bias
    barriers += 4 * choice.shares_output  # of the weights in two places
    job = JOB_BYTES + JOB_BYTES_QUERIES * (problem.q_seq != "dense")
    job += JOB_BYTES_KEYS * (problem.kv_seq != "dense")
    job += JOB_BYTES_CUT * cuts_tiles(problem, choice)
    if choice.pairs:  # of both parts of a block, and of the tile that one CTA draws for both
        barriers += 2 * (choice.k_stages + choice.v_stages) + 2
    rows = ROWS_PER_CONSUMER * choice.consumers
    stage_v = tile.n * row_bytes_v
    if problem.eight_bit:  # transposed: a row a column of V, 128 keys a box
        stage_v = problem.head_dim_v * 128 * -(-tile.n // 128)
        stage_v += ONES_BYTES * choice.sums_stored
    return {
        "Q": rows * (max(row_bytes_qk, row_bytes_o) if choice.output_over_q else row_bytes_qk),
        "K": choice.k_stages * tile.n * row_bytes_qk,
        "V": choice.v_stages * stage_v,
        **({"Raw": choice.raw_stages * choice.raw_keys * row_bytes_v} if problem.eight_bit else {}),
        **(raw_sizes(problem, choice) if problem.widens else {}),
        **({"O": rows * row_bytes_o} if staged else {}),
        **({"Words": choice.consumers * 4 * tile.n * DROP_WORD_BYTES} if problem.dropout else {}),
        **({"Scales": scale_bytes(tile, choice)} if problem.token_scales else {}),
        **({"Weights": 2 * rows * 128, "Factors": 2 * rows * 8} if choice.shares_output else {}),
        **({"Lines": 4 * choice.consumers * lines} if (lines := line_bytes(problem, tile)) else {}),
        **({"Bias": choice.consumers * score_tile_bytes(64, tile.n)} if problem.bias else {}),
        "Barriers": BARRIER_BYTES * barriers,
        "Job": job,
    }


def scale_bytes(tile: Tile, choice: Choice) -> int:
    """Bytes of the scales of a block's tokens, which each warp lays down for itself."""
    return choice.consumers * 4 * tile.n * TOKEN_SCALE_BYTES


def line_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of the lines of a block, which each warp lays down for itself."""
    columns, distances = lines_in(problem.fragment_digests)
    return 4 * (tile.n * columns + (tile.n + ROWS_PER_WARP) * distances)


def raw_sizes(problem: Problem, choice: Choice) -> dict[str, int]:
    """Bytes of what K and V are widened from."""
    dims = {"RawK": problem.head_dim_qk, "RawV": problem.head_dim_v}
    return {
        name: choice.raw_stages * choice.raw_keys * 128 * boxes_of(d, 1) for name, d in dims.items()
    }


def explain(
    problem: Problem, choice: Choice, registers: int, smem_bytes: int, room: int
) -> tuple[str, ...]:
    """The plan's choices in prose, for people. room: bytes of shared memory that a CTA may use."""
    keys = choice.promote_blocks * choice.block
    place = "total in registers" if choice.promote_blocks == 1 else "mean in shared memory"
    promoted = (f"sums of 8-bit products join a {place} every {keys} keys",) if keys else ()
    return (
        "2 warpgroups share the output's columns of 64 query rows, one of which weighs keys"
        if choice.shares_output
        else "1 consumer warpgroup of 64 query rows shares the tensor cores with other CTAs'"
        if choice.consumers == 1
        else f"{choice.consumers} consumer warpgroups of 64 query rows "
        + ("take turns at the tensor cores" if choice.take_turns else "share the tensor cores")
        + (", and visit each the blocks that its rows see" if choice.rolls else ""),
        f"{choice.block} keys a block: {registers} of {operand_limit(problem, choice)} operand "
        "registers a thread",
        "queries in registers: each product reads less shared memory"
        if choice.q_in_registers
        else "queries in shared memory: registers hold a larger block or output instead",
        f"{choice.k_stages} K and {choice.v_stages} V stages: {smem_bytes} of {room} "
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
        ("tiles drawn from a counter, " + "by one of two CTAs for both, " * choice.pairs)
        + ("longest rows first" if problem.masks else "one head after another")
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
