"""The kernel of what a score learns: where there is one, what it decides, and its exact sums."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen import SpecError
from attngen.call.fragments import LEARNED_SLOT
from attngen.call.learned_sums import DIGITS, LEAST_EXPONENT, WORDS, learned_sums
from attngen.call.numbers import Arguments
from attngen.call.tensors import TensorDesc
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.fragments import features
from attngen.frontends.pytorch import learned
from attngen.frontends.pytorch.callables import calls as callables
from attngen.kernels.mma_sync.backward import plan as of_warps
from attngen.kernels.plan import plans
from attngen.kernels.wgmma.backward.plan import OF_KEYS, OF_LEARNED, LearnedPlan
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import resolve
from attngen.targets.target import TARGETS
from tests.support.own_fragments import kept

TABLE, ROW = torch.ones(33, 4, requires_grad=True), torch.ones(2, 64, requires_grad=True)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    with kept():
        yield


def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * torch.sigmoid(ROW[b, i]) + TABLE[(j - i).clamp(-16, 16) + 16, h]


def problem_of(**fields: Any) -> Any:
    program = callables._traced("score_mod", score, torch.device("cpu")).program
    name = features.register_program(program).name
    spec = AttentionSpec(score_mod=name, directions=("bwd",), **fields)
    problem, *_ = resolve(spec, features.scan())
    return problem


def plan_of(problem: Any) -> LearnedPlan:
    (found,) = [each for each in plans(problem, "sm_90a") if each.family == OF_LEARNED]
    assert isinstance(found, LearnedPlan)
    return found


def test_weights_times_slopes_of_functions_do_not_say_by_their_sign_that_they_are_dropped() -> None:
    """Which may be negative themselves; those of a softcap are not."""
    for fields, capped in (({}, False), ({"softcap": True}, True)):
        problem = problem_of(head_dim=192, dropout=True, **fields)
        problem = replace(problem, scores=("softcap",)) if capped else problem
        (found,) = [each for each in plans(problem, "sm_90a") if each.family == OF_KEYS]
        source = render_problem(problem, found).text
        assert ("slopes[i] |= packed[i] & 0x80008000u" in source) == capped


def test_kernels_fit_beside_everything_and_there_are_none_of_scores_that_learn_nothing() -> None:
    for d in (16, 64, 128, 192, 256):
        for more in ({}, {"bias": "post_scale", "dropout": True, "attn_mask": True}):
            plan = plan_of(problem_of(head_dim=d, **more))
            assert plan.smem_bytes <= TARGETS["sm_90a"].cta_smem_bytes and plan.stages >= 2
    plain = resolve(AttentionSpec(head_dim=64, directions=("bwd",)), features.scan())
    assert all(each.family != OF_LEARNED for each in plans(plain[0], "sm_90a"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_120"])
def test_kernels_by_products_of_warps_fit_and_bring_keys_ahead_where_they_can(arch: str) -> None:
    stages = set()
    for d in (16, 64, 128, 192, 256):
        for more in ({}, {"bias": "post_scale", "dropout": True, "attn_mask": True}):
            problem = problem_of(head_dim=d, **more)
            *_, plan = plans(problem, arch)
            assert isinstance(plan, of_warps.LearnedPlan)
            assert plan.smem_bytes <= TARGETS[arch].cta_smem_bytes
            text = render_problem(problem, plan).text
            assert ("stage ^= 1;" in text) == (plan.stages == 2) and "p.dlearned" in text
            stages.add(plan.stages)
    assert stages == {1, 2}


def test_source_says_which_elements_share_numbers_and_whether_sums_are_exact() -> None:
    for deterministic in (False, True):
        problem = problem_of(head_dim=64, deterministic=deterministic)
        text = render_problem(problem, plan_of(problem)).text
        exact = "true" if deterministic else "false"
        assert f"using Sums = DistanceSums<2, {exact}, 64, 1>;" in text
        reaches = enumerate(("kRow", "kDiagonal"))
        kinds = {each: f"finish<{n}, Reach::{each}>" for n, each in reaches}
        assert all(finish in text for finish in kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"deterministic": True, "dropout": True}], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_kernels_compile_without_spills(d, fields) -> None:
    problem = problem_of(head_dim=d, **fields)
    binary, _ = compile_source(render_problem(problem, plan_of(problem)), problem, "sm_90a")
    assert binary.resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("sm_80", {"head_dim": 128, "mask": "causal", "dropout": True}),
        ("sm_120", {"head_dim": 64, "bias": "post_scale", "deterministic": True}),
    ],
)
def test_kernels_by_products_of_warps_compile_without_spills(arch, fields) -> None:
    problem = problem_of(**fields)
    *_, plan = plans(problem, arch)
    binary, _ = compile_source(render_problem(problem, plan), problem, arch)
    assert binary.resources.spill_bytes == 0


def words_of(terms: list[float]) -> list[int]:
    """The words of an exact sum, as learned_sums.cuh adds each term."""
    words = [0] * WORDS
    for term in terms:
        (bits,) = struct.unpack("<I", struct.pack("<f", term))
        exponent, sign = bits >> 23 & 255, -1 if bits >> 31 else 1
        if exponent == 255:
            words[DIGITS] += 1
            continue
        mantissa = bits & 0x7FFFFF | (0x800000 if exponent else 0)
        shift = max(exponent, 1) - 150 - LEAST_EXPONENT
        digit, rest = divmod(max(shift, 0), 24)
        moved = (mantissa >> min(-min(shift, 0), 31)) << rest
        words[digit] += sign * (moved & 0xFFFFFF)
        if moved >> 24:
            words[digit + 1] += sign * (moved >> 24)
    return words


def test_exact_sums_are_those_of_their_terms_in_any_order() -> None:
    draw = random.Random(3)
    sums = []
    for scale in (1e-18, 1.0, 1e30):
        terms = [draw.uniform(-scale, scale) * 10 ** draw.uniform(-6, 0) for _ in range(200)]
        terms = torch.tensor(terms).tolist()  # float32
        words = words_of(terms)
        draw.shuffle(terms)
        assert words_of(terms) == words
        sums.append((words, math.fsum(terms)))
    sums.append((words_of([3.0e38, 1.0, -3.0e38]), 1.0))
    sums.append((words_of([1.0, math.inf]), math.nan))
    made = {"dlearned": torch.tensor([words for words, _ in sums])}
    found = learned.GRADIENTS["dlearned"](SimpleNamespace(made=made))
    wanted = torch.tensor([each for _, each in sums])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0, equal_nan=True)


def test_sums_have_a_word_a_number_or_exact_ones_up_to_a_limit() -> None:
    given = {LEARNED_SLOT: TensorDesc.contiguous((60_000_000,), "float32")}
    (plain,) = learned_sums(given, Arguments())
    assert (plain.sizes, plain.dtype, plain.preset) == ((60_000_000,), "float32", True)
    with pytest.raises(SpecError, match="learns 60000000 numbers.* more than 4: pass"):
        learned_sums(given, Arguments(deterministic=True))
    given = {LEARNED_SLOT: TensorDesc.contiguous((7,), "float32")}
    (exact,) = learned_sums(given, Arguments(deterministic=True))
    assert (exact.sizes, exact.dtype) == ((7, WORDS), "int64")


def test_scores_that_learn_have_no_order_of_their_own_under_narrow_windows() -> None:
    """An order makes sums exact, ten words each, where calls without one have room for a float."""
    fields: dict[str, Any] = {"head_dim": 128, "mask": "causal", "window": True}
    assert problem_of(**fields).orders() == (problem_of(**fields),)
    plain, *_ = resolve(AttentionSpec(directions=("bwd",), **fields), features.scan())
    assert len(plain.orders()) == 2


def times_queries(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * ROW[b, i]


def test_what_multiplies_scores_of_queries_is_learned_where_dq_is_rounded() -> None:
    program = callables._traced("score_mod", times_queries, torch.device("cpu")).program
    fields = {"score_mod": features.register_program(program).name, "head_dim": 128}

    def kernels(**more: Any) -> dict[str, Any]:
        spec = AttentionSpec(directions=("bwd",), **{**fields, **more})
        problem, *_ = resolve(spec, features.scan())
        return {each.family: each for each in plans(problem, "sm_90a")}

    found = kernels(dtype="bf16")
    assert OF_LEARNED not in found and found["bwd_convert"].learns
    # float16 has no numbers as small as what keeps zeros apart; two kernels round dQ themselves.
    for others in (kernels(dtype="fp16"), kernels(dtype="bf16", head_dim=192)):
        assert OF_LEARNED in others
        assert "bwd_convert" not in others or not others["bwd_convert"].learns
