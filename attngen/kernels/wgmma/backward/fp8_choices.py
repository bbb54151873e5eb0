"""Choices of an 8-bit backward: its kernels, tiles, stages and shared memory.

As in 16 bits one kernel makes dQ, dK and dV of head dims up to 128, but its operands take half the
room: consumers have some of a tile's keys in registers, and beside each block of queries and output
gradients there is one of both transposed, which a kernel before lays down. A kernel that transposes
them itself, by its loading warp, reads and writes another 32 KB of shared memory a block, which its
products keep busy: 232 KB a block of 64 queries at head dim 128, for 1,280 cycles of products. It
measured 0.71 to 0.79 of this one.

Above 128, up to 256, a tile of keys is worked on twice, each time for half of the columns of dQ, dK
and dV, which are then what registers hold. S and dP are made for both, as two kernels would, one of
dK and dV and one of dQ, and products are as many: 2 S, 2 dP, and each gradient once. But dK and dV
of whole rows would leave a CTA 64 keys, for which each block of queries, and its transposes, come
from L2 twice as often: 64 KB at 256 for 1,024 cycles of products, where a half of 128 keys loads
48 KB and adds 32 KB of dQ for 1,792. Shared memory holds all but gradients on their way out, 225 of
227 KB at 256, so that these leave from registers.
"""

from __future__ import annotations

from dataclasses import replace

from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import Tile, score_tile_bytes
from ...support.around import CONVERT_THREADS, PREPARE_THREADS, ConvertPlan
from ..shared import BARRIER_BYTES, boxes_of
from .bias_gradient import bias_plans
from .feasible import CONSUMERS, JOB_BYTES, Draft, finish
from .plan import (
    CONVERT_8,
    MAIN_8,
    PREPARE_8,
    ROWS_PER_CONSUMER,
    AnyPlan,
    BackwardPlan,
    TurningPlan,
)

# Registers a thread of the producer and of a consumer: a CTA starts with 504 for these roles
# together, no more of which may be handed over.
REGISTERS = (40, 232)
ROOMY_REGISTERS = (56, 224)
BARRIERS = 26
FACTOR_BYTES = 16
PART_COLUMNS = 128  # of dK and dV of 64 keys, which a consumer has registers for
PART_BYTES = 4  # in a job, which part it is
STAGES = 2  # of all that blocks have
IMAGE_ROW_BYTES = 128
BOX_COLUMNS = 64  # of 16 bits in a row of 128 bytes
STEP = 32  # of a product's reduction, in 8-bit elements
HELD_STEPS = 2  # of a tile's keys in registers; three measured 0.98 to 1.01, one 0.96 at 16k
SMALL_HEAD_DIM = 80  # up to which consumers do with fewer registers
FEW_COLUMNS = 192  # of both gradients in parts, beside which there is room for as many steps more


def column_parts(problem: Problem) -> int:
    """Parts of the gradients' columns, for each of which a tile of keys is worked on."""
    return -(-max(problem.head_dim_qk, problem.head_dim_v) // PART_COLUMNS)


def part_columns(problem: Problem, head_dim: int) -> int:
    """Columns of a gradient in each part: all, or whole steps, of which the last may have fewer."""
    parts = column_parts(problem)
    return head_dim if parts == 1 else -(-head_dim // (16 * parts)) * 16


def image_bytes(problem: Problem) -> int:
    """Bytes of a block's queries and output gradients, transposed, of one part: a row of 128 bytes
    a column, with the block's queries of both. In a mixed backward they are widened instead."""
    d, d_v = problem.head_dim_qk, problem.head_dim_v
    if problem.mixed:
        return (boxes_of(d) + boxes_of(d_v)) * ROWS_PER_CONSUMER * IMAGE_ROW_BYTES
    return max(part_columns(problem, d), part_columns(problem, d_v)) * IMAGE_ROW_BYTES


def key_image_bytes(problem: Problem, key_columns: int) -> int:
    """Bytes of a tile's keys, transposed: a row a column; or widened, in boxes."""
    if problem.mixed:
        return boxes_of(key_columns) * ROWS_PER_CONSUMER * CONSUMERS * IMAGE_ROW_BYTES
    return key_columns * IMAGE_ROW_BYTES


def dq_columns_of(problem: Problem) -> int:
    """Columns of dQ that a warpgroup has in each part: whole steps, or in a mixed backward, whose
    keys lie in boxes of 64 columns, one of these or a share of one."""
    d, parts = problem.head_dim_qk, column_parts(problem)
    if problem.mixed and d > BOX_COLUMNS:
        return BOX_COLUMNS
    return -(-d // (16 * CONSUMERS * parts)) * 16


def leaves_rows(problem: Problem) -> bool:
    """Whether dK and dV leave from registers, for want of room in shared memory."""
    return column_parts(problem) > 1 or problem.mixed


def plans(problem: Problem, target: Target) -> tuple[AnyPlan, ...]:
    """The plan of each kernel, in the order of launch; none where nothing fits."""
    main = _main(problem, target)
    if main.smem_bytes > target.cta_smem_bytes:
        return ()
    biases = bias_plans(problem, main.row_block, target)
    return (_prepare(problem, main), main, _convert(problem, main), *biases)


def _main(problem: Problem, target: Target) -> BackwardPlan:
    """128 keys and 64 queries: beside 128, as in 16 bits up to head dim 64, consumers spill."""
    tile = Tile(ROWS_PER_CONSUMER, ROWS_PER_CONSUMER * CONSUMERS)
    d, d_v, parts = problem.head_dim_qk, problem.head_dim_v, column_parts(problem)
    dq_columns, rows_leave = dq_columns_of(problem), leaves_rows(problem)
    row_bytes = max(d, d_v) * DTYPE_BYTES[problem.dtype_of("dk")]
    block, keys, gradient = tile.m * 128, tile.n * 128, -(-row_bytes // 128) * tile.n * 128
    qk, v = boxes_of(d, 1), boxes_of(d_v, 1)
    sizes = {
        **{"Q": STAGES * qk * block, "Do": STAGES * v * block},
        "Turned": STAGES * image_bytes(problem),
        **{"K": qk * keys, "V": v * keys},
        "Kt": key_image_bytes(problem, dq_columns * CONSUMERS),
        "Ds": STAGES * block * (CONSUMERS if problem.mixed else 1),
        "Dq": CONSUMERS * ROWS_PER_CONSUMER * dq_columns * 4,
        **({} if rows_leave else {"Dv": gradient}),
        **({} if rows_leave or problem.bias else {"Dk": gradient}),
        **({"Bias": CONSUMERS * score_tile_bytes(tile.m, 64)} if problem.bias else {}),
    }
    rows = STAGES * tile.m * 4
    barriers = (BARRIERS + 2 * problem.bias) * BARRIER_BYTES
    small = {"Factors": FACTOR_BYTES, "Lse": rows, "D": rows, "Barriers": barriers}
    draft = Draft(
        family=MAIN_8,
        tile=tile,
        sizes=sizes,
        small=small,
        q_stages=STAGES,
        do_stages=STAGES,
        ds_stages=STAGES,
        row_block=tile.m,
        dq_split="columns",
        dq_columns=dq_columns,
        dk_columns=part_columns(problem, d),
        dv_columns=part_columns(problem, d_v),
        registers=_registers(problem),
        job_bytes=JOB_BYTES + PART_BYTES * (parts > 1),
        deterministic=problem.deterministic,
    )
    return replace(finish(problem, draft, target), held_steps=_held_steps(problem))


def is_crowded(problem: Problem) -> bool:
    """Whether registers are few: beside derivatives or a mask's bits, or lengths with scores, an
    order or random bits."""
    beside = bool(problem.scores) or problem.deterministic or problem.dropout
    lengths = problem.varlen and beside
    return "softcap" in problem.scores or problem.bias or problem.attn_mask or lengths


def _registers(problem: Problem) -> tuple[int, int]:
    """Registers of the producer and of consumers. The producer's threads that add in an order to
    blocks of windows need more where lengths vary, and consumers of small heads less."""
    small = max(problem.head_dim_qk, problem.head_dim_v) <= SMALL_HEAD_DIM
    ordered = problem.deterministic and problem.varlen and "window" in problem.masks
    return ROOMY_REGISTERS if _is_roomy(problem) or small and ordered else REGISTERS


def _is_roomy(problem: Problem) -> bool:
    """Whether gradients in parts leave registers to more of the keys, and to the producer."""
    d, d_v = problem.head_dim_qk, problem.head_dim_v
    columns = part_columns(problem, d) + part_columns(problem, d_v)
    return column_parts(problem) > 1 and columns <= FEW_COLUMNS


def steps_of(extent: int) -> int:
    """The steps of a reduction along so many elements."""
    return -(-extent // STEP)


def _held_steps(problem: Problem) -> int:
    """Steps of a tile's keys that consumers have registers for: none beside random bits."""
    most = HELD_STEPS
    if _is_roomy(problem):
        most += HELD_STEPS
    elif column_parts(problem) > 1 and (problem.varlen or problem.deterministic):
        most = 0
    beside = is_crowded(problem) or problem.dropout
    if problem.mixed:  # elsewhere one spills, here none does
        most = int(problem.deterministic and not problem.varlen)
    return 0 if beside else min(most, steps_of(problem.head_dim_qk))


def _prepare(problem: Problem, main: BackwardPlan) -> TurningPlan:
    parts = column_parts(problem)
    key_columns = main.dq_columns * main.consumers * parts
    image = max(parts * image_bytes(problem), key_image_bytes(problem, key_columns))
    return TurningPlan(
        arch=main.arch,
        family=PREPARE_8,
        tile=main.tile,
        key_columns=key_columns,
        smem_bytes=staged_blocks(problem) * main.tile.m * 128 + image,
        threads=PREPARE_THREADS,
    )


def staged_blocks(problem: Problem) -> int:
    """Boxes of a block's rows that the kernel before has in shared memory at a time: its queries
    and output gradients, or a tile's keys, which are two blocks."""
    qk, v = boxes_of(problem.head_dim_qk, 1), boxes_of(problem.head_dim_v, 1)
    return max(2 * qk, qk + v)


def _convert(problem: Problem, main: BackwardPlan) -> ConvertPlan:
    parts = main.consumers * column_parts(problem)
    split, columns = main.dq_split, main.dq_columns
    shape = (main.row_block, parts, split, columns, 0, 0, 0)
    return ConvertPlan(main.arch, CONVERT_8, *shape, CONVERT_THREADS)
