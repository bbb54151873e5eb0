"""Views, casts: what the templates of their kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import Problem
from ..view import CPP_ELEMENTS, KernelView
from .cast import D_O_LARGEST, D_O_STORE, LARGEST, NEXT_SCALES, TENSORS, CastPlan

LARGEST_STORED = {"e4m3": 448.0, "e5m2": 57344.0}


@dataclass(frozen=True)
class NextScalesView:
    """Values of templates/kernels/support/cast_next_scales.cu.j2.

    threads: of the only CTA; largest: the largest number that is stored.
    """

    kernel: KernelView
    threads: int
    largest: float


@dataclass(frozen=True)
class GradientLargestView:
    """Values of templates/kernels/support/cast_d_o_largest.cu.j2.

    element: C++ type of the numbers. threads: of a CTA.
    """

    kernel: KernelView
    element: str
    threads: int


@dataclass(frozen=True)
class LargestView(GradientLargestView):
    """Values of templates/kernels/support/cast_largest.cu.j2.

    tensors: those of a launch, of which any may be empty.
    """

    tensors: int


@dataclass(frozen=True)
class GradientStoreView(GradientLargestView):
    """Values of templates/kernels/support/cast_d_o_store.cu.j2.

    stored: C++ type of the numbers in 8 bits; largest: the largest of these.
    """

    stored: str
    largest: float


@dataclass(frozen=True)
class StoreView(LargestView):
    """Values of templates/kernels/support/cast_store.cu.j2, and of cast_rows.cu.j2, as of the view
    above."""

    stored: str
    largest: float


CastView = NextScalesView | GradientLargestView


def cast_view(problem: Problem, plan: CastPlan, kernel: KernelView) -> CastView:
    """The view of a kernel that casts as its plan says."""
    element, stored = CPP_ELEMENTS[problem.dtype_q], CPP_ELEMENTS[problem.dtype_kv]
    largest = LARGEST_STORED[problem.dtype_kv]
    if plan.family == NEXT_SCALES:
        return NextScalesView(kernel, plan.threads, largest)
    if plan.family == D_O_LARGEST:
        return GradientLargestView(kernel, element, plan.threads)
    if plan.family == D_O_STORE:
        return GradientStoreView(kernel, element, plan.threads, stored, largest)
    if plan.family == LARGEST:
        return LargestView(kernel, element, plan.threads, TENSORS)
    return StoreView(kernel, element, plan.threads, TENSORS, stored, largest)
