"""The order of a softmax step: which plans ask for what, and what the compiler makes of it."""

from __future__ import annotations

import pytest

from attngen.compiler.builder import render_problem
from attngen.compiler.compile import run_nvrtc
from attngen.fragments import features
from attngen.kernels.plan import plan
from attngen.kernels.wgmma.forward import choices
from attngen.kernels.wgmma.forward.plan import Plan, SoftmaxOrder
from attngen.spec import resolve
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.problem import Problem
from tests.support.sass import list_instructions


def problem_of(head_dim: int, **asked: object) -> Problem:
    (problem,) = resolve.resolve(AttentionSpec(head_dim, **asked), features.scan())  # type: ignore[arg-type]
    return problem


def order_of(head_dim: int, **asked: object) -> SoftmaxOrder:
    return plan(problem_of(head_dim, **asked), "sm_90a").softmax


@pytest.mark.parametrize(("head_dim", "mask"), [(128, "none"), (128, "causal"), (192, "causal")])
def test_order_between_104_and_192_is_lazy_and_ahead(head_dim: int, mask: str) -> None:
    order = order_of(head_dim, mask=mask)
    assert order.lazy_rescale_log2 and order.quarters_ahead and not order.rescale_first


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_order_elsewhere_is_lazy_and_left_to_the_compiler(head_dim: int) -> None:
    order = order_of(head_dim, mask="causal")
    assert order.lazy_rescale_log2 and not order.quarters_ahead


@pytest.mark.parametrize(
    "asked",
    [
        {"return_max_logit": True, "softcap": True},
        {"attn_mask": True},
        {"dropout": True, "alibi": True},
    ],
    ids=lambda asked: "+".join(asked),
)
def test_order_beside_true_maxima_and_what_needs_registers_is_eager(asked: dict[str, bool]) -> None:
    order = order_of(128, mask="causal", **asked)
    assert not (order.lazy_rescale_log2 or order.quarters_ahead)


@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_order_beside_the_largest_score_is_that_without_it(head_dim: int) -> None:
    asked = order_of(head_dim, mask="causal", return_max_logit=True)
    assert asked == order_of(head_dim, mask="causal")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_order_beside_a_softcap_is_as_lazy_as_float16_allows(head_dim: int) -> None:
    capped = order_of(head_dim, dtype="fp16", softcap=True)
    assert capped.lazy_rescale_log2 > order_of(head_dim, dtype="fp16").lazy_rescale_log2
    assert 2.0**capped.lazy_rescale_log2 <= 65504 / 2


def test_order_beside_random_words_alone_is_lazy_and_ahead() -> None:
    assert order_of(128, mask="causal", dropout=True) == order_of(128, mask="causal")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_order_of_8_bits_is_lazy_and_in_parts(head_dim: int) -> None:
    order = order_of(head_dim, dtype="e4m3")
    assert order.lazy_rescale_log2 and order.parts
    assert {other.parts for other in choices.orders(order)} == set(choices.PARTS)


def test_order_of_8_bits_by_sums_of_a_block_is_in_one_part() -> None:
    """Three consumers under a mask: two, at other head dims, look for maxima."""
    order = order_of(128, dtype="e4m3", mask="causal")
    assert order.lazy_rescale_log2 > order_of(64, dtype="e4m3", mask="causal").lazy_rescale_log2
    assert {other.parts for other in choices.orders(order)} == {1}


@pytest.mark.parametrize("feature", ["return_max_logit", "softcap"])
def test_order_of_8_bits_beside_true_maxima_and_scores_is_eager(feature: str) -> None:
    order = order_of(128, dtype="e4m3", **{feature: True})
    assert not (order.lazy_rescale_log2 or order.parts)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 256])
def test_compiled_parts_begin_with_exponentials_whose_results_wait(head_dim: int) -> None:
    """A part is a run of instructions that nothing is moved into or out of."""
    problem = problem_of(head_dim, dtype="e4m3")
    chosen = plan(problem, "sm_90a")
    assert isinstance(chosen, Plan)
    cubin = run_nvrtc(render_problem(problem, chosen).text, "kernel.cu", "sm_90a").cubin
    code = list_instructions(cubin)
    fences = [i for i, text in enumerate(code) if text.startswith("PMTRIG")]
    copies = 2 if chosen.promote_blocks > 1 else 1  # of the block's code, one with sums promoted
    assert len(fences) == copies * (chosen.softmax.parts + 1)
    first = code[fences[0] : fences[1]]
    assert sum(text.startswith("MUFU.EX2") for text in first) >= chosen.tile.n // 2 // 3 - 8
    assert not any("E4M3.F32.PACK" in text for text in first)


def test_orders_of_a_lazy_plan_have_every_share_ahead() -> None:
    found = list(choices.orders(order_of(128)))
    assert len(found) == len(set(found))
    assert {order.quarters_ahead for order in found} == {0, 1, 2}
    assert not any(order.rescale_first and order.quarters_ahead for order in found)
    eager = SoftmaxOrder(0, rescale_first=True, pair_sums=True)
    assert not any(order.quarters_ahead for order in choices.orders(eager))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_compiled_exponentials_precede_the_wait_as_planned(mask: str) -> None:
    """In the last loop, that of blocks without a mask, between the waits for both products."""
    problem = problem_of(128, mask=mask)
    chosen = plan(problem, "sm_90a")
    assert isinstance(chosen, Plan)
    cubin = run_nvrtc(render_problem(problem, chosen).text, "kernel.cu", "sm_90a").cubin
    code = list_instructions(cubin)
    scores = max(i for i, text in enumerate(code) if _waits(text, 1))
    output = next(i for i in range(scores, len(code)) if _waits(code[i], 0))
    found = sum(text.startswith("MUFU.EX2") for text in code[scores:output])
    planned = chosen.tile.n // 2 * chosen.softmax.quarters_ahead // 4
    assert planned <= found < planned + chosen.tile.n // 8


def _waits(text: str, pending: int) -> bool:
    return text.startswith("WARPGROUP.DEPBAR") and text.endswith(f"{pending:#x}")
