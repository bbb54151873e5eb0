"""Registers of a backward's kernels: how roles share them, and what a problem leaves of them."""

from __future__ import annotations

from collections.abc import Iterable

from ....fragments.program import has_program
from ....spec.problem import Problem
from ..shared import LIGHT_SCORES
from .plan import MAIN, OF_BIAS, OF_KEPT, OF_KEYS, OF_QUERIES, WITH_BIAS, WITH_SUMS
from .wide import is_wide, is_widest, sends_ahead

# Registers a thread of the producer and of a consumer. The fused kernel's producer spills at 24;
# dQ's needs no more, and its consumers all that is left.
REGISTERS = {
    MAIN: (40, 232),
    WITH_BIAS: (40, 232),
    WITH_SUMS: (40, 232),
    OF_KEYS: (56, 224),
    OF_QUERIES: (24, 240),
    OF_KEPT: (32, 160),
    OF_BIAS: (40, 232),
}
GATHER_REGISTERS = (56, 224)  # where the producer's warps copy rows themselves
# Where two CTAs share tiles; where warps copy rows there; and of dQ where none do and little is
# looked up, whose producer needs less.
PAIR_REGISTERS, PAIR_GATHER_REGISTERS, PAIR_DQ_REGISTERS = (56, 224), (72, 216), (40, 232)
# Of a bias's gradient, where the loader looks lengths up, copies rows or brings the widest.
BIAS_LENGTH_REGISTERS = (72, 216)
SMALL_REGISTERS = (56, 224)  # of the fused kernel up to head dim 32
# What spills in the kernel that makes all three gradients: features (`features_of`) where all of
# them meet any of others. 240 registers a consumer would leave the producer 24, in which it spills.
FUSED_SPILLS = (
    ("deterministic dropout", "scores attn_mask varlen"),
    ("gather", "small heavy deterministic dropout attn_mask varlen"),
    ("arithmetic", "small"),
    ("arithmetic dropout", "varlen"),
    ("small uneven", "attn_mask"),
    ("small uneven dropout", "deterministic bias varlen"),
    ("bias", "varlen"),
    ("small bias", "unlike several deterministic attn_mask"),
    ("large bias", "arithmetic dropout"),
    ("large bias several", "attn_mask"),
)
# Of the dQ kernel, the values of dQ, S, dP and packed dS that a thread has registers for, and the
# most keys a block: the least of those whose features meet.
DQ_OPERANDS = (
    ("", 208),
    ("heavy", 200),
    ("widest", 200),
    ("dropout", 200),
    ("dropout attn_mask", 176),
    ("gather", 192),
    ("gather attn_mask heavy", 176),
    ("gather dropout bias", 176),
    ("gather paired", 184),
    ("gather dropout bias heavy paired", 168),
    ("heavy bias paired", 184),
    ("heavy bias varlen paired", 168),
    ("heavy varlen widest", 184),
    ("dropout varlen paired", 168),
    ("gather dropout paired", 168),
    ("attn_mask paired", 192),
    ("dropout attn_mask bias paired", 168),
)
DQ_KEYS = (("", 128), ("heavy", 96), ("heavy varlen", 80), ("program", 80))
# Of the dK and dV kernel, the most queries a block, the same way.
DKV_QUERIES = (
    ("", 64),
    ("wide several bias", 48),
    ("wide several dropout attn_mask", 32),
    ("gather dropout paired", 48),
    ("widest", 48),
    ("widest bias heavy dropout", 32),
    ("widest bias heavy attn_mask varlen", 32),
    ("ahead positions", 32),
    ("ahead dropout", 32),
    ("ahead heavy", 32),
)


def fuses(problem: Problem) -> bool:
    """Whether one kernel makes all three gradients: both accumulators of 64 keys in registers,
    and a box of 64 columns of dQ, or all of them, for each consumer."""
    d, largest = problem.head_dim_qk, max(problem.head_dim_qk, problem.head_dim_v)
    if largest > 128 or d <= 64 < largest:
        return False
    found = features_of(problem)
    return not any(
        found.issuperset(these.split()) and not found.isdisjoint(others.split())
        for these, others in FUSED_SPILLS
    )


def pair_registers(problem: Problem, family: str) -> tuple[int, int]:
    """Registers of the producer and of consumers of a kernel of which two CTAs share tiles."""
    if family == OF_QUERIES:
        looked_up = problem.bias and problem.varlen and problem.positions
        return PAIR_REGISTERS if problem.gather or looked_up else PAIR_DQ_REGISTERS
    return PAIR_GATHER_REGISTERS if problem.gather else PAIR_REGISTERS


def features_of(problem: Problem) -> frozenset[str]:
    """Features that take registers.

    small: blocks of 128 queries; uneven: of these all but equal head dims up to 32; heavy: scores
    that are more than a multiply-add; arithmetic: one that is no bias; program: one that comes from
    a callable; paired, widest, ahead: as wide.py says.
    """
    d, d_v, scores = problem.head_dim_qk, problem.head_dim_v, problem.scores
    heavy = set(scores) - LIGHT_SCORES
    features = {
        "small": max(d, d_v) <= 64,
        "large": max(d, d_v) > 64,
        "uneven": d > 32 or d != d_v,
        "unlike": d != d_v,
        "paired": is_wide(problem),
        "widest": is_widest(problem),
        "ahead": sends_ahead(problem),
        "wide": d_v > 192,
        "scores": bool(scores),
        "several": len(scores) > 1,
        "heavy": bool(heavy),
        "arithmetic": not all(name.endswith("_bias") for name in heavy),
        "program": has_program(scores),
        "bias": problem.bias,
        "deterministic": problem.deterministic,
        "dropout": problem.dropout,
        "attn_mask": problem.attn_mask,
        "varlen": problem.varlen,
        "positions": problem.positions,
        "gather": problem.gather,
    }
    return frozenset(name for name, is_there in features.items() if is_there)


def least(limits: Iterable[tuple[str, int]], features: frozenset[str]) -> int:
    return min(limit for these, limit in limits if features.issuperset(these.split()))
