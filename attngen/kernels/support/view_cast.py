"""View, casts: what the templates of the two kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import Problem
from ..view import CPP_ELEMENTS, KernelView
from .cast import LARGEST, TENSORS, CastPlan

LARGEST_STORED = {"e4m3": 448.0, "e5m2": 57344.0}


@dataclass(frozen=True)
class LargestView:
    """Values of templates/kernels/support/cast_largest.cu.j2.

    element: C++ type of the numbers. tensors: those of a launch, of which any may be empty.
    threads: of a CTA.
    """

    kernel: KernelView
    element: str
    tensors: int
    threads: int


@dataclass(frozen=True)
class StoreView(LargestView):
    """Values of templates/kernels/support/cast_store.cu.j2.

    stored: C++ type of the numbers in 8 bits; largest: the largest of these.
    """

    stored: str
    largest: float


def cast_view(problem: Problem, plan: CastPlan, kernel: KernelView) -> LargestView:
    """The view of a kernel that casts as its plan says."""
    first = LargestView(kernel, CPP_ELEMENTS[problem.dtype_q], TENSORS, plan.threads)
    if plan.family == LARGEST:
        return first
    stored = problem.dtype_kv
    return StoreView(**vars(first), stored=CPP_ELEMENTS[stored], largest=LARGEST_STORED[stored])
