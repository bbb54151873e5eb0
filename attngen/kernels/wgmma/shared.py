"""Shared facts of this instruction's families: needs of a target, names, sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from ...fragments.program import has_program
from ...spec.problem import BIASED_HEAD_DIM, MIXED_BIASED_HEAD_DIM, MIXED_HEAD_DIM, Problem
from ...targets.target import Instruction

PREFIX = "sm90_"  # of the names of kernels, whose symbols begin with them
NEEDS: frozenset[Instruction] = frozenset({"griddepcontrol", "setmaxnreg", "tma", "wgmma"})
BARRIER_BYTES = 8
DRAWN_BYTES = 16  # of the number of a tile that one of two CTAs draws for both
LIGHT_SCORES = frozenset({"alibi"})  # a multiply-add an element needs no registers


def boxes_of(head_dim: int, element_bytes: int = 2) -> int:
    """128-byte boxes, which the swizzle spans, of a row of so many elements."""
    return -(-head_dim * element_bytes // 128)


def chains_of(steps: int) -> tuple[int, ...]:
    """The lengths of chains of a product with both operands in shared memory, of so many steps: of
    more than 16 a box at a time (attngen/mma/gemm.cuh)."""
    whole, rest = divmod(steps, 4)
    return ((4, rest) if rest else (4,)) if steps > 16 else (steps,)


def refuse_together(problem: Problem) -> Iterator[str]:
    """Why no template has all parts of the problem. Specs of this kind are refused by `resolve`,
    but a trace may have such problems, too."""
    added = problem.bias or problem.attn_mask or problem.dropout or problem.positions
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    wide = problem.direction == "bwd" and problem.bias and largest > BIASED_HEAD_DIM
    without = problem.positions or wide  # in 8 bits
    if problem.decode and has_program(problem.scores):
        yield "kernels that split keys have no scores of callables"
    beside = problem.bias or problem.decode or problem.paged or problem.eight_bit or problem.widens
    if problem.listed and beside:
        yield "masks made before have kernels beside 16 bits, without a bias, pages and split keys"
    most = MIXED_BIASED_HEAD_DIM if problem.bias else MIXED_HEAD_DIM
    if problem.mixed and not (problem.eight_bit and largest <= most):
        yield "a mixed backward is of FP8 operands, and has no room for these head dims"
    if added and (problem.decode or problem.widens or (without and problem.eight_bit)):
        yield "no kernel does all of this together yet"
