"""Products of weights and of dS in an 8-bit backward: of 8 bits, or in a mixed one of 16."""

from __future__ import annotations

from dataclasses import dataclass

from ....spec.problem import Problem
from .fp8_choices import BOX_COLUMNS, dq_columns_of
from .view_main import MMA_DEPTH

EIGHT_BIT_DEPTH = 32  # of a product's reduction, in 8-bit elements
WIDE = "Bf16"  # C++: the struct of what weights and dS are stored as in a mixed backward


@dataclass(frozen=True, kw_only=True)
class GradientProducts:
    """C++ of what dV, dK and dQ of a block are made of.

    wide: whether they have 16 bits; depth: elements of a step of a product's reduction. packed:
    registers of a warpgroup's weights, or dS, of a block. pack, pack_some: statements that round
    all weights, or eight from index `i`; kept: the bits that dropout leaves of register `i`. of_do:
    where a block's output gradients lie behind its queries; ds_boxes: how many boxes dS of a block
    takes, a factor with its sign of multiplication, empty where it is one; of_keys: where a
    warpgroup's columns of a tile's keys lie. dv, dk, dq: statements that issue products.
    """

    wide: bool
    depth: int
    packed: str
    pack: str
    pack_some: str
    kept: str
    of_do: str
    ds_boxes: str
    of_keys: str
    dv: str
    dk: str
    dq: str


IN_8_BITS = GradientProducts(
    wide=False,
    depth=EIGHT_BIT_DEPTH,
    packed="kTileM / 8",
    pack="pack_rows<Weight, kTileM>(packed, scores)",
    pack_some="pack_rows<Weight>(packed + i / 4, scores + i)",
    kept="kept.bytes(i / 2, i % 2)",
    of_do="kTileM",
    ds_boxes="",
    of_keys="warpgroup * (kDqColumns * 128)",
    dv="gemm_register_shared<DvMma, kTileM / 32, kTurnedBytes>"
    "(sums.dv, packed_weights, turned() + kTurnedDo, true)",
    dk="gemm_register_shared<DkMma, kTileM / 32, kTurnedBytes>"
    "(sums.dk, packed_gradients, turned(), true)",
    dq="gemm_shared_shared<DqMma, kTileN / 32, kQueryBoxBytes, kTurnedKeyBytes>"
    "(dq, dq_rows(), dq_keys())",
)


def products_of(problem: Problem) -> GradientProducts:
    """The products of a problem."""
    if not problem.mixed:
        return IN_8_BITS
    in_boxes = dq_columns_of(problem) == BOX_COLUMNS
    return GradientProducts(
        wide=True,
        depth=MMA_DEPTH,
        packed="kTileM / 4",
        pack="pack_pairs<Weight, kTileM / 2>(packed, scores)",
        pack_some="pack_pairs<Weight, 8>(packed + i / 2, scores + i)",
        kept="kept_pair(kept, i)",
        of_do="ceil_div(kHeadDimQk, 64) * kQueryBoxBytes",
        ds_boxes="kConsumers * ",
        of_keys="warpgroup * kKeyBoxBytes" if in_boxes else "warpgroup * (kDqColumns * 2)",
        dv="gemm_accumulate<DvMma, kTileM / 16, kQueryBoxBytes>"
        "(sums.dv, packed_weights, turned() + kTurnedDo)",
        dk="gemm_accumulate<DkMma, kTileM / 16, kQueryBoxBytes>"
        "(sums.dk, packed_gradients, turned())",
        dq="gemm_shared_across<DqMma, kTileN / 16, kQueryBoxBytes, kKeyBoxBytes>"
        "(dq, dq_rows(), dq_keys())",
    )
