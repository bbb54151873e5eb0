"""The views of decode's kernels, and of those beside the families: each decision, by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.kernels.base import Axis, SmemRegion
from attngen.kernels.support.combine import CombinePlan
from attngen.kernels.support.mask_pack import MaskPlan
from attngen.kernels.support.order import VarlenPlan
from attngen.kernels.support.view_combine import combine_view
from attngen.kernels.support.view_mask_pack import mask_pack_view
from attngen.kernels.support.view_order import OrderView, fills_output, order_view
from attngen.kernels.uses import uses_of
from attngen.kernels.view import KernelView
from attngen.kernels.wgmma.decode.plan import DecodePlan, plans
from attngen.kernels.wgmma.decode.view import (
    CopyLoop,
    DecodeView,
    chains_of,
    copy_loop,
    decode_view,
    headers_of,
    paces,
    spares_stages,
)
from attngen.spec.problem import Problem
from attngen.targets.target import DEFAULT

PROBLEM = Problem(
    direction="fwd",
    dtype_q="bf16",
    dtype_kv="bf16",
    dtype_o="bf16",
    head_dim_qk=128,
    head_dim_v=128,
    masks=("causal",),
    scores=(),
    softmax="vanilla",
    q_seq="dense",
    kv_seq="used",
    kv_fetch="tma",
    kv_iter="range",
    decode=True,
)
WIDENED = replace(PROBLEM, dtype_kv="e4m3")
KERNEL = KernelView("entry", "template", (), 0)
AXIS = Axis(rows=64, group_heads=8, group_bytes=1 << 20, sums=False, follows=False, tail_share=0)


def plan_of(problem: Problem, **changed: object) -> DecodePlan:
    found = plans(problem, DEFAULT)[0]
    assert isinstance(found, DecodePlan)
    return replace(found, **changed)  # type: ignore[arg-type]


def view_of(problem: Problem, **changed: object) -> DecodeView:
    uses = uses_of(problem, features.scan())
    return decode_view(problem, plan_of(problem, **changed), KERNEL, uses, ())


@pytest.mark.parametrize(
    ("head_dim", "chains"),
    [(64, (4,)), (72, (5,)), (256, (16,)), (264, (4, 1)), (320, (4, 4)), (576, (4, 4))],
)
def test_chains_are_whole_up_to_sixteen_products(head_dim: int, chains: tuple[int, ...]) -> None:
    assert chains_of(head_dim) == chains


def test_stages_are_spared_where_ctas_share_an_sm_and_have_more_than_two() -> None:
    assert spares_stages(PROBLEM, plan_of(PROBLEM, ctas=2, stages=3))
    assert not spares_stages(PROBLEM, plan_of(PROBLEM, ctas=2, stages=2))
    assert not spares_stages(PROBLEM, plan_of(PROBLEM, ctas=1, stages=3))
    assert not spares_stages(WIDENED, plan_of(WIDENED, ctas=2, stages=3))


def test_loaders_wait_together_or_for_those_behind() -> None:
    plan = plan_of(PROBLEM, ctas=2, stages=3)
    assert copy_loop(PROBLEM, plan, paced=False) == CopyLoop(False, True, "stages")
    assert copy_loop(PROBLEM, plan, paced=True) == CopyLoop(True, False, "")
    alone = plan_of(PROBLEM, ctas=1, stages=3)
    assert copy_loop(PROBLEM, alone, paced=False) == CopyLoop(False, False, "")


def test_a_plan_without_a_place_for_it_has_no_paced_loop() -> None:
    region = SmemRegion("Pace", 0, 16)
    assert view_of(PROBLEM, smem=(region,)).paced_loop == CopyLoop(True, False, "")
    assert view_of(PROBLEM, smem=()).paced_loop is None
    assert not paces(plan_of(PROBLEM, smem=(replace(region, name="Q"),)))


def test_headers_are_those_that_the_problem_needs() -> None:
    plan = plan_of(PROBLEM, smem=())
    plain = headers_of(PROBLEM, plan)
    assert plain[0] == "context" and plain[-1] == "softmax/row"
    paged = replace(PROBLEM, kv_fetch="page_tma", q_seq="packed", max_logit=True)
    more = {"copy/paged_blocks", "maximum", "scheduler/packed_tiles"}
    assert set(headers_of(paged, plan)) - set(plain) == more
    assert set(headers_of(WIDENED, plan)) - set(plain) == {"mma/widen", "scale"}


def test_widened_keys_have_their_own_elements_and_scales() -> None:
    plain, widened = view_of(PROBLEM), view_of(WIDENED)
    assert (plain.element, plain.weight_element, plain.pv_mma_element) == (
        "Bf16",
        "Element",
        "bf16",
    )
    assert (plain.scale_log2, plain.part_scale, plain.key_boxes) == (
        *("p.scale_log2", "1.f", "kQkBoxes"),
    )
    assert (widened.element, widened.kv_element) == ("Bf16", "E4m3")
    assert (widened.weight_element, widened.pv_mma_element) == ("WeightElement", "f16")
    assert (widened.scale_log2, widened.part_scale, widened.key_boxes) == (
        *("scale_log2", "output_scale", "kKBoxes"),
    )
    assert not widened.evens_loads and plain.evens_loads == (plan_of(PROBLEM).ctas > 1)


def test_wide_outputs_are_shared_by_two_warpgroups() -> None:
    wide = view_of(replace(PROBLEM, head_dim_v=264))
    assert (wide.consumers, wide.gives_registers, wide.last_box_may_miss) == (2, True, True)
    whole = view_of(replace(PROBLEM, head_dim_v=512))
    assert (whole.consumers, whole.last_box_may_miss) == (2, False)
    narrow = view_of(PROBLEM)
    assert (narrow.consumers, narrow.gives_registers, narrow.last_box_may_miss) == (1, False, False)


def test_sequences_of_queries_are_dense_used_or_packed() -> None:
    assert (view_of(PROBLEM).ragged, view_of(PROBLEM).packed) == (False, False)
    used = view_of(replace(PROBLEM, q_seq="used"))
    assert (used.ragged, used.packed) == (True, False)
    packed = view_of(replace(PROBLEM, q_seq="packed"))
    assert (packed.ragged, packed.packed) == (True, True)


def test_rows_of_no_sequence_are_combined_where_lengths_vary() -> None:
    plan = plans(PROBLEM, DEFAULT)[1]
    assert isinstance(plan, CombinePlan)
    uses = uses_of(PROBLEM, features.scan())
    assert not combine_view(PROBLEM, plan, KERNEL, uses, ()).ragged
    packed = replace(PROBLEM, q_seq="packed", dtype_q="fp16")
    view = combine_view(packed, plan, KERNEL, uses, ())
    assert (view.ragged, view.element, view.max_splits) == (True, "Fp16", plan.max_splits)


@pytest.mark.parametrize(("rows", "columns"), [(True, False), (False, True), (True, True)])
def test_masks_are_packed_for_the_kernels_behind(rows: bool, columns: bool) -> None:
    view = mask_pack_view(MaskPlan("sm_90a", "mask_pack", rows, columns, 512), KERNEL)
    assert (view.packs_rows, view.packs_columns, view.warps) == (rows, columns, 16)


def order(problem: Problem, *, q: bool = True, kv: bool = False, fills: bool = False) -> OrderView:
    plan = VarlenPlan(
        "sm_90a", "varlen_prepare", AXIS if q else None, AXIS if kv else None, fills, 1024
    )
    return order_view(problem, plan, KERNEL, uses_of(problem, features.scan()), ())


def test_orders_are_written_of_the_axes_that_kernels_work_through() -> None:
    queries = order(PROBLEM)
    assert queries.queries is not None and queries.queries.of_queries and queries.keys is None
    both = order(replace(PROBLEM, direction="bwd"), kv=True)
    assert both.keys is not None and not both.keys.of_queries and not both.before_forward


def test_rows_of_no_sequence_are_filled_where_queries_have_them_and_others_do_not() -> None:
    packed = replace(PROBLEM, q_seq="packed")
    output = order(packed, fills=True).output
    assert output is not None and output.name == "o"
    assert order(packed).output is None
    assert order(PROBLEM, fills=True).output is None  # dense queries
    assert order(PROBLEM, fills=True).many_ctas
    plan = VarlenPlan("sm_90a", "varlen_prepare", AXIS, None, True, 1024)
    assert fills_output(packed, plan) and not fills_output(PROBLEM, plan)


def test_kernels_repeat_their_launch_description() -> None:
    source = render_problem(PROBLEM, plan_of(PROBLEM))
    members = "\n".join(
        f"  {kind} {name};" for kind, name in (("TensorMap", "map_k"), ("TensorMap", "map_v"))
    )
    assert f"struct Params {{\n{members}" in source.text
    assert f"sizeof(Params) == {source.kernel.params_bytes}" in source.text
    assert f"// {source.kernel.entry}\n" in source.text
