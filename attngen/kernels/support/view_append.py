"""View, appending: what the template of the kernel that writes to a cache reads."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import DTYPE_BYTES, Problem
from ..view import CPP_ELEMENTS, KernelView
from .append import AppendPlan


@dataclass(frozen=True)
class AppendView:
    """Values of templates/kernels/support/append.cu.j2.

    element, stored: C++ types of new tokens and of the cache; element_bytes, stored_bytes: of an
    element of each. head_dim_qk, head_dim_v: columns of a head's keys and values. threads, warps:
    of a CTA. computes: whether columns may be rotated or narrowed, of 16 bits; else all are copied.
    narrows: whether the cache has 8 bits where tokens have 16.
    """

    kernel: KernelView
    element: str
    element_bytes: int
    stored: str
    stored_bytes: int
    head_dim_qk: int
    head_dim_v: int
    threads: int
    warps: int
    computes: bool
    narrows: bool


def append_view(problem: Problem, plan: AppendPlan, kernel: KernelView) -> AppendView:
    """The view of the kernel that appends tokens of `problem` as its plan says."""
    return AppendView(
        kernel=kernel,
        element=CPP_ELEMENTS[problem.dtype_q],
        element_bytes=DTYPE_BYTES[problem.dtype_q],
        stored=CPP_ELEMENTS[problem.dtype_kv],
        stored_bytes=DTYPE_BYTES[problem.dtype_kv],
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        threads=plan.threads,
        warps=plan.warps,
        computes=not problem.eight_bit,
        narrows=problem.dtype_q != problem.dtype_kv,
    )
