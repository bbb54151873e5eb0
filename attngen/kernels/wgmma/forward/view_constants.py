"""View, constants: headers, types, sizes, and shapes of products of a forward kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....fragments.program import has_program
from ....spec.problem import Problem
from ...view import CPP_ELEMENTS, MMA_ELEMENTS
from ..shared import boxes_of, chains_of
from .choices import own_columns
from .feasible import REST_REGISTERS
from .plan import Plan
from .traits import converts, cuts_tiles, fills_gaps, first_boxes, rest_columns, starts_early

# Columns of an instruction's sum that 128 registers a thread hold beside scores of widened keys.
WIDENED_COLUMNS, WIDENED_LARGEST = 128, 192
PARTED_COLUMNS = 128  # beyond which an 8-bit product has two parts, for the same reason
ONES_COLUMNS, ONES_REGISTERS = 8, 4  # behind V's, where products sum weights as they are stored


@dataclass(frozen=True)
class Constant:
    """A constant of the kernel: C++ type, name and value."""

    type: str
    name: str
    value: str


@dataclass(frozen=True)
class Constants:
    """Constants of a kernel: of the plan, of boxes beside those of all kernels, and the places of
    regions in shared memory."""

    plan: tuple[Constant, ...]
    boxes: tuple[Constant, ...]
    smem: tuple[Constant, ...]


@dataclass(frozen=True)
class Alias:
    """A name of the kernel's for a type of the headers'."""

    name: str
    type: str


@dataclass(frozen=True)
class Elements:
    """Element types, by their C++ names, and what follows from their sizes.

    named: aliases. q, kv: as stored; tile: of what scores read in tiles. box_columns: of a box of
    128 bytes of Q and K.
    keys_a_register: the keys of a block for which a thread has a register of weights. four_ones:
    four ones of V's type in a word.
    """

    named: tuple[Alias, ...]
    q: str
    kv: str
    tile: str
    box_columns: int
    keys_a_register: int
    four_ones: str


@dataclass(frozen=True)
class Product:
    """Shape of a product's instructions, as the macros under templates/mma take it.

    operands: the macro, by where the operands lie. columns: of the sum. a, b: element types, in
    PTX's names. steps: lengths of chains along the reduction. sum_registers: the last registers of
    the sum, which are an array of their own. places: C++, where boxes of the second operand lie.
    """

    operands: str
    columns: int
    a: str
    b: str
    steps: tuple[int, ...]
    sum_registers: int = 0
    places: str = ""


@dataclass(frozen=True)
class BlockPlaces:
    """Where boxes and groups of 8 rows of a block lie, as products find them. C++."""

    box_bytes: str
    group_bytes: str


@dataclass(frozen=True)
class Products:
    """The two products of a consumer.

    qk: of queries and keys; pv: of weights and values, or its first part. pv_parts: equal parts of
    an 8-bit one; pv_rest_columns: of a second part, or 0. k_block, v_block: blocks of K and V, as
    products of 16 bits read them.
    """

    qk: Product
    pv: Product
    pv_parts: int
    pv_rest_columns: int
    k_block: BlockPlaces
    v_block: BlockPlaces


def headers_of(problem: Problem, plan: Plan, reads_tile: bool) -> tuple[str, ...]:
    """Headers that a kernel includes, in their order. reads_tile: whether scores read a tensor."""
    stores = problem.gather or (plan.stores_rows and problem.dtype_o != "fp32")
    wanted = {
        "context.cuh": True,
        "copy/gathered_rows.cuh": problem.gather,
        "copy/paged_blocks.cuh": problem.paged,
        "dropout.cuh": problem.dropout,
        "dropout_bytes.cuh": problem.dropout and problem.eight_bit,
        "dropout_places.cuh": problem.dropout and problem.positions,
        "mask_bits.cuh": problem.attn_mask,
        "asked_mask.cuh": problem.asks_mask,
        "mma/fragment.cuh": True,
        "mma/gemm.cuh": True,
        "mma/gemm_across.cuh": plan.shares_output,
        "mma/score_tile.cuh": reads_tile,
        "mma/store.cuh": stores,
        "mma/transpose.cuh": problem.eight_bit,
        "mma/widen.cuh": problem.widens,
        "ptx/barrier.cuh": True,
        "ptx/cluster.cuh": plan.pairs,
        "ptx/global.cuh": starts_early(problem, plan),
        "ptx/math.cuh": True,
        "ptx/matrix_move.cuh": True,
        "ptx/tma.cuh": True,
        "scheduler/block_map.cuh": problem.listed,
        "maximum.cuh": problem.max_logit,
        "scale.cuh": converts(problem),
        "score_lines.cuh": has_program(problem.scores),
        "scheduler/cut_tiles.cuh": cuts_tiles(problem, plan),
        "scheduler/gap_rows.cuh": fills_gaps(problem, plan),
        "scheduler/kv_blocks.cuh": True,
        "scheduler/sequence_order.cuh": problem.varlen,
        "scheduler/tile_order.cuh": True,
        "softmax/join.cuh": problem.continues,
        "softmax/online.cuh": True,
        "softmax/row.cuh": True,
        "token_scales.cuh": problem.token_scales,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def elements_of(problem: Problem) -> Elements:
    """The element types of a problem's operands, weights and output."""
    q, kv = CPP_ELEMENTS[problem.dtype_q], CPP_ELEMENTS[problem.dtype_kv]
    named = {"Element": "E4m3" if problem.eight_bit else "Fp16" if problem.widens else q}
    named |= {"QElement": q, "KvElement": kv} if problem.widens else {}
    named |= {"Output": CPP_ELEMENTS[problem.dtype_o]} if problem.dtype_o != "fp32" else {}
    return Elements(
        named=tuple(Alias(name, type_) for name, type_ in named.items()),
        q=q,
        kv=kv,
        tile=CPP_ELEMENTS[problem.dtype_bias] if problem.eight_bit else "Element",
        box_columns=128 if problem.eight_bit else 64,
        keys_a_register=8 if problem.eight_bit else 4,
        four_ones="0x3C3C3C3C" if problem.dtype_kv == "e5m2" else "0x38383838",
    )


def constants_of(problem: Problem, plan: Plan) -> Constants:
    """The constants that follow from a problem and its plan."""
    return Constants(
        plan=tuple(plan_constants(problem, plan)),
        boxes=tuple(box_constants(problem)),
        smem=tuple(smem_constants(plan)),
    )


def box_constants(problem: Problem) -> Iterator[Constant]:
    """Boxes of the output, and of keys and values before they are widened, of which a block may
    have several parts."""
    if problem.dtype_o != "fp32":
        columns = 128 if problem.dtype_o in ("e4m3", "e5m2") else 64
        yield Constant("int", "kOBoxColumns", str(columns))
        yield Constant("int", "kOBoxes", "ceil_div(kHeadDimV, kOBoxColumns)")
    if problem.widens:
        yield Constant("int", "kRawColumns", "128")
        yield Constant("int", "kRawKBoxes", "ceil_div(kHeadDimQk, kRawColumns)")
        yield Constant("int", "kRawVBoxes", "ceil_div(kHeadDimV, kRawColumns)")
    if problem.widens and problem.paged:
        yield Constant("int", "kRawParts", "kTileN / kRawKeys")


def plan_constants(problem: Problem, plan: Plan) -> Iterator[Constant]:
    """The plan's numbers, as constants. kAhead: of the scores that a thread has of its first row,
    those weighed before the product is awaited."""
    pipeline, softmax = plan.pipeline, plan.softmax
    numbers = {
        "kTileM": plan.tile.m,
        "kTileN": plan.tile.n,
        "kKStages": pipeline.k_stages,
        "kVStages": pipeline.v_stages,
    }
    if converts(problem):
        numbers |= {"kRawStages": pipeline.raw_stages, "kRawKeys": pipeline.raw_keys}
        numbers |= {"kPromoteBlocks": plan.promote_blocks} if plan.promote_blocks > 1 else {}
    if rest := rest_columns(problem, plan):
        numbers |= {"kOwnColumns": own_columns(problem), "kRestColumns": rest}
        numbers["kRestRegisters"] = REST_REGISTERS
    if plan.pairs:
        numbers["kKFirstBoxes"] = first_boxes(boxes_of(problem.head_dim_qk), plan)
        numbers["kVFirstBoxes"] = first_boxes(boxes_of(problem.head_dim_v), plan)
    numbers |= {
        "kConsumers": pipeline.consumers,
        "kProducerRegisters": pipeline.producer_registers,
        "kConsumerRegisters": pipeline.consumer_registers,
        "kLazyRescaleLog2": softmax.lazy_rescale_log2,
    }
    yield from (Constant("int", name, str(value)) for name, value in numbers.items())
    if softmax.quarters_ahead:
        yield Constant("int", "kAhead", f"kTileN / 8 * {softmax.quarters_ahead}")
    if softmax.parts:
        yield Constant("int", "kSoftmaxParts", str(softmax.parts))
    flags = {
        "kPairSums": softmax.pair_sums,
        "kLongestFirst": plan.schedule.longest_first,
        "kOutputOverQ": pipeline.output_over_q,
    }
    yield from (Constant("bool", name, str(flag).lower()) for name, flag in flags.items())


def smem_constants(plan: Plan) -> Iterator[Constant]:
    """Places of the regions of shared memory, in bytes, and the size of a job's."""
    for region in plan.smem:
        yield Constant("u32", f"kSmem{region.name}", str(region.offset))
        if region.name == "Job":
            yield Constant("u32", "kJobBytes", str(region.bytes))


def products_of(problem: Problem, plan: Plan, line_in_products: bool) -> Products:
    """Both products. line_in_products: whether sums of queries and keys begin with a line."""
    return Products(
        qk=qk_product(problem, plan, line_in_products),
        pv=pv_product(problem, plan),
        pv_parts=pv_parts(problem),
        pv_rest_columns=pv_rest_columns(problem),
        k_block=product_block(problem, "K"),
        v_block=product_block(problem, "V"),
    )


def qk_product(problem: Problem, plan: Plan, line_in_products: bool) -> Product:
    """The product of queries and keys. line_in_products: whether sums begin with a line."""
    in_registers = plan.pipeline.q_in_registers
    step = 32 if problem.eight_bit else 16
    boxes = ["kKeyBoxBytes" if problem.eight_bit else "kKBoxBytes"]
    adds = [] if in_registers else ["true" if line_in_products else "false"]
    groups = [] if problem.eight_bit else ["kKGroupBytes"]
    return Product(
        operands="register_shared" if in_registers else "shared_shared",
        columns=plan.tile.n,
        a=_operand_type(problem, problem.dtype_q),
        b=problem.dtype_kv,
        steps=qk_chains(-(-problem.head_dim_qk // step), plan),
        places=", ".join([*boxes, *adds, *groups]),
    )


def qk_chains(steps: int, plan: Plan) -> tuple[int, ...]:
    """Lengths of chains of a product of queries and keys, which may come in two parts."""
    first = min(steps, 4 * first_boxes(-(-steps // 4), plan))
    rest = chains_of(steps - first) if steps > first else ()
    return (*chains_of(first), *rest)


def pv_product(problem: Problem, plan: Plan) -> Product:
    """The product of weights and values, or its first part."""
    columns, sum_registers = problem.head_dim_v // pv_parts(problem), 0
    columns -= rest_columns(problem, plan)
    if plan.sums_stored:
        columns, sum_registers = problem.head_dim_v + ONES_COLUMNS, ONES_REGISTERS
    if problem.widens and problem.head_dim_v > WIDENED_LARGEST:
        columns = WIDENED_COLUMNS
    weights = "e4m3" if problem.eight_bit else "fp16" if problem.widens else problem.dtype_q
    return Product(
        operands="register_shared",
        columns=columns,
        a=_operand_type(problem, weights),
        b=problem.dtype_kv,
        steps=(plan.tile.n // (32 if problem.eight_bit else 16),),
        sum_registers=sum_registers,
    )


def pv_parts(problem: Problem) -> int:
    """Equal parts of an 8-bit product of weights and values."""
    return 2 if problem.eight_bit and problem.head_dim_v > PARTED_COLUMNS else 1


def pv_rest_columns(problem: Problem) -> int:
    """Columns of a second product of weights and widened values, where one has no room for all."""
    wide = problem.widens and problem.head_dim_v > WIDENED_LARGEST
    return problem.head_dim_v - WIDENED_COLUMNS if wide else 0


def block_places(problem: Problem, tensor: str, box_bytes: str = "kKeyBoxBytes") -> BlockPlaces:
    """Where boxes of K or V lie as they were loaded. box_bytes: of boxes that are one copy."""
    if problem.paged:
        return BlockPlaces(f"{tensor}Blocks::kBoxBytes", f"{tensor}Blocks::kGroupBytes")
    return BlockPlaces(box_bytes, "1024")


def product_block(problem: Problem, tensor: str) -> BlockPlaces:
    """Where boxes of K or V lie as products of 16 bits read them."""
    if problem.widens:
        return BlockPlaces("kKeyBoxBytes", "1024")
    return block_places(problem, tensor)


def _operand_type(problem: Problem, dtype: str) -> str:
    """A dtype in PTX's names."""
    return dtype if problem.eight_bit else MMA_ELEMENTS[dtype]
