"""Headers that the kernels of an 8-bit backward include."""

from __future__ import annotations

from ....spec.problem import Problem
from ...support.view_parts import included
from .fp8_choices import column_parts


def main_headers(problem: Problem) -> str:
    """The lines that include the headers of fp8.cu.j2."""
    packed = "packed" in (problem.q_seq, problem.kv_seq)
    return included(
        ("context.cuh", True),
        ("dropout_bytes.cuh", problem.dropout),
        ("dropout_pairs.cuh", problem.dropout and problem.mixed),
        ("mask_bits.cuh", problem.attn_mask),
        ("mma/fragment.cuh", True),
        ("mma/gemm.cuh", True),
        ("mma/stage.cuh", True),
        ("mma/score_tile.cuh", problem.bias),
        ("mma/stage8.cuh", True),
        ("ptx/barrier.cuh", True),
        ("ptx/global.cuh", True),
        ("ptx/math.cuh", True),
        ("ptx/matrix_move.cuh", True),
        ("ptx/tma.cuh", True),
        ("ptx/turn.cuh", problem.deterministic),
        ("scale_gradients.cuh", True),
        ("scheduler/gap_rows.cuh", problem.varlen),
        ("scheduler/kv_blocks.cuh", True),
        ("scheduler/q_blocks.cuh", True),
        ("scheduler/packed_tiles.cuh", packed),
        ("scheduler/sequence_order.cuh", problem.varlen),
        ("scheduler/tile_order.cuh", True),
        ("softmax/transposed.cuh", True),
        ("special.cuh", bool(problem.scores)),
    )


def turning_headers(problem: Problem) -> str:
    """The lines that include the headers of fp8_prepare.cu.j2."""
    return included(
        ("context.cuh", problem.varlen),
        ("dropout_bytes.cuh", problem.dropout),
        ("mma/transpose.cuh", not problem.mixed),
        ("mma/widen.cuh", problem.mixed),
        ("mma/transpose_halves.cuh", column_parts(problem) > 1),
        ("platform.cuh", True),
        ("ptx/barrier.cuh", True),
        ("ptx/global.cuh", True),
        ("ptx/math.cuh", True),
        ("ptx/tma.cuh", True),
        ("scale_gradients.cuh", True),
        ("scheduler/grid_place.cuh", True),
        ("scheduler/packed_tiles.cuh", "packed" in (problem.q_seq, problem.kv_seq)),
        ("softmax/row.cuh", True),
    )


def convert_headers(problem: Problem) -> str:
    """The lines that include the headers of fp8_convert.cu.j2."""
    return included(
        ("context.cuh", problem.varlen),
        ("mma/fragment.cuh", True),
        ("ptx/math.cuh", True),
        ("ptx/tma.cuh", True),
        ("scale_gradients.cuh", True),
        ("scheduler/grid_place.cuh", True),
        ("scheduler/packed_tiles.cuh", problem.q_seq == "packed"),
    )
