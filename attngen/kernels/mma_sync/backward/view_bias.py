"""View: what the template of a bias's gradient by products of warps reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...support.view_parts import Uses
from .plan import BiasPlan
from .view_rows import RowsView, headers_of, rows_fields


@dataclass(frozen=True, kw_only=True)
class MmaBiasView(RowsView):
    """All that the template of a bias's gradient names. Strings are C++.

    sloped: whether weights are times derivatives of scores that come behind the bias. unit: what
    makes scaled scores of products. ptx: types of operands in 8 bits, of which there are none.
    drops_by_bits: whether bits say what is dropped, as signs of such weights do not.
    """

    sloped: bool
    drops_by_bits: bool
    unit: str = "p.scale"
    ptx: None = None


def bias_view(
    problem: Problem, plan: BiasPlan, uses: Uses, kernel: KernelEntry, root: Path
) -> MmaBiasView:
    """The view of the kernel that makes the gradient of the bias of `problem` as `plan` says.

    uses: its fragments by role. kernel: its launch description. root: the templates' directory.
    """
    before_scale = "pre_scale_bias" in problem.scores
    fields, scale = (
        rows_fields(problem, plan, uses, kernel, root),
        "p.scale" if before_scale else "1.f",
    )
    return MmaBiasView(
        **fields,
        headers=headers_of(problem),
        sloped=before_scale and fields["scores"].bend,
        drops_by_bits=problem.dropout and before_scale and fields["scores"].signed,
        factor=f"{scale} * p.keep_scale" if problem.dropout else scale,
    )
