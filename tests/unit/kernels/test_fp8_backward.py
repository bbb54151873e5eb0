"""Plans of the backward in 8 bits: which head dims they serve, what they fit in, that they compile
without spills, and what lies transposed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from attngen import AttentionSpec, SpecError
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.kernels import plan
from attngen.kernels.support.around import ConvertPlan
from attngen.kernels.wgmma.backward.family import FAMILY
from attngen.kernels.wgmma.backward.fp8_choices import image_bytes
from attngen.kernels.wgmma.backward.plan import (
    CONVERT_8,
    MAIN_8,
    PREPARE_8,
    BackwardPlan,
    TurningPlan,
)
from attngen.runtime.run_time import Extent, workspace_bytes
from attngen.spec.problem import (
    BIASED_HEAD_DIM,
    MIXED_BIASED_HEAD_DIM,
    MIXED_HEAD_DIM,
    Problem,
)
from attngen.spec.resolve import resolve
from attngen.targets.target import DEFAULT
from tools import sweep

HEAD_DIMS = tuple(range(16, 257, 16))


def problem_of(**fields: object) -> Problem:
    """The backward of a spec in e4m3, with these fields."""
    given = {"head_dim": 128, "dtype": "e4m3", "directions": ("bwd",), **fields}
    (found,) = resolve(AttentionSpec(**given), features.scan())  # type: ignore[arg-type]
    return found


def main_of(problem: Problem) -> BackwardPlan:
    (found,) = (x for x in plan.plans(problem, DEFAULT.name) if x.family == MAIN_8)
    assert isinstance(found, BackwardPlan)
    return found


def drawn(count: int, seed: int) -> Iterator[Problem]:
    """Random problems of the backward in 8 bits."""
    choose = random.Random(seed)
    for _ in range(count):
        d = choose.choice(HEAD_DIMS)
        d_v = choose.choice((d, choose.choice(HEAD_DIMS)))
        added = max(d, d_v) <= BIASED_HEAD_DIM and choose.random() < 0.5
        yield problem_of(
            head_dim=d,
            head_dim_v=d_v,
            bias="post_scale" if added else "none",
            dtype=choose.choice(("e4m3", "e4m3", "e5m2")),
            d_o_dtype=choose.choice(("e4m3", "e5m2")),
            grad_dtype=choose.choice(("bf16", "fp16", "e5m2", "e4m3")),
            out_dtype=choose.choice(("bf16", "e4m3")),
            layout=choose.choice(("bshd", "thd", "thd_bshd_bshd")),
            mask=choose.choice(("none", "causal")),
            seqused=choose.random() < 0.3,
            window=choose.random() < 0.4,
            alibi=choose.random() < 0.3,
            softcap=choose.random() < 0.3,
            deterministic=choose.random() < 0.4,
            dropout=choose.random() < 0.4,
        )


@pytest.mark.parametrize("grad", ["bf16", "e5m2"])
def test_every_pair_of_head_dims_fits(grad: str) -> None:
    for d, d_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
        fields = dict(head_dim=d, head_dim_v=d_v, grad_dtype=grad, layout="thd")
        main = main_of(problem_of(**fields))
        assert main.smem_bytes <= DEFAULT.cta_smem_bytes
        assert main.dk_columns + main.dv_columns <= 256


def test_mixed_backwards_fit_beside_operands_in_both_widths() -> None:
    assert main_of(problem_of(backward="mixed", layout="thd")).smem_bytes > 224 << 10
    for d, d_v in itertools.product(range(16, MIXED_HEAD_DIM + 1, 16), repeat=2):
        biased = max(d, d_v) <= MIXED_BIASED_HEAD_DIM
        bias = "post_scale" if biased else "none"
        fields = dict(head_dim=d, head_dim_v=d_v, layout="thd", grad_dtype="e5m2", bias=bias)
        assert main_of(problem_of(backward="mixed", **fields)).smem_bytes <= DEFAULT.cta_smem_bytes


@pytest.mark.parametrize(
    "fields",
    [
        dict(head_dim=256),
        dict(head_dim=64, head_dim_v=144),
        dict(head_dim=80, bias="post_scale"),
        dict(dtype="bf16"),
    ],
    ids=str,
)
def test_mixed_backwards_without_room_are_refused_with_the_arithmetic(
    fields: dict[str, object],
) -> None:
    with pytest.raises(SpecError, match=r"backward 'mixed'.*(227 KiB|FP8)") as caught:
        problem_of(backward="mixed", **fields)
    assert "backward=None" in caught.value.reasons[-1]


def test_mixed_products_have_half_the_rate() -> None:
    problem = problem_of(backward="mixed")
    lines = "".join(FAMILY.aim(problem, main_of(problem), DEFAULT))
    twice = 2 * 64 * 128 * (128 * 5 + 128 * 3) / DEFAULT.mma_flops
    assert f"({twice:.0f} of products" in lines


def test_keys_stay_in_registers_where_nothing_else_needs_these() -> None:
    assert main_of(problem_of()).held_steps == 2
    assert main_of(problem_of(layout="thd")).held_steps == 2
    assert main_of(problem_of(head_dim=32)).held_steps == 1
    assert main_of(problem_of(head_dim=80, softcap=True)).held_steps == 0
    assert main_of(problem_of(dropout=True)).held_steps == 0
    assert main_of(problem_of(head_dim=192, head_dim_v=128)).held_steps == 4
    assert main_of(problem_of(head_dim=256, seqused=True)).held_steps == 0


@pytest.mark.parametrize(("d", "d_v", "halves"), [(192, 128, (96, 64)), (208, 144, (112, 80))])
def test_wide_gradients_are_made_in_halves_of_their_columns(
    d: int, d_v: int, halves: tuple[int, int]
) -> None:
    problem = problem_of(head_dim=d, head_dim_v=d_v)
    main = main_of(problem)
    assert (main.dk_columns, main.dv_columns) == halves
    prepare, _, convert = plan.plans(problem, DEFAULT.name)
    assert isinstance(prepare, TurningPlan) and isinstance(convert, ConvertPlan)
    assert convert.parts == 4 and prepare.key_columns == 4 * convert.dq_columns >= d
    kernel = render_problem(problem, main).kernel
    assert kernel.tile_parts == 2 and kernel.turned_bytes == 2 * 128 * max(halves)


def test_aim_counts_whole_scores_beside_half_of_each_gradient() -> None:
    problem = problem_of(head_dim=192, head_dim_v=128)
    lines = "".join(FAMILY.aim(problem, main_of(problem), DEFAULT))
    half = 2 * 64 * 128 * (192 + 128 + 96 + 96 + 64) / DEFAULT.mma_flops
    assert f"({half:.0f} of products" in lines


def test_turns_have_room_for_halves_beside_kernels_that_know_of_none() -> None:
    problem = problem_of(head_dim=256)
    q = Extent(1, 640, 2, 256, 0, 0, 0)
    sizes = {
        x.family: workspace_bytes(render_problem(problem, x).kernel, q)["turns"]
        for x in plan.plans(problem, DEFAULT.name)
    }
    assert sizes == {PREPARE_8: 80, MAIN_8: 160, CONVERT_8: 80}


def test_dq_is_shared_by_columns_of_whole_steps() -> None:
    problem = problem_of(head_dim=80, head_dim_v=96)
    main = main_of(problem)
    assert (main.dq_split, main.dq_columns) == ("columns", 48)
    prepare, *_ = plan.plans(problem, DEFAULT.name)
    assert isinstance(prepare, TurningPlan) and prepare.key_columns == 96
    assert image_bytes(problem) == 96 * 128


MIXED = [
    problem_of(backward="mixed"),
    problem_of(backward="mixed", layout="thd", mask="causal", window=True, deterministic=True),
    problem_of(backward="mixed", head_dim=64, bias="post_scale", softcap=True, grad_dtype="e5m2"),
]
PACKED = [
    problem_of(layout="thd", grad_dtype="e5m2"),
    problem_of(layout="thd", dtype="e5m2", mask="causal", window=True, deterministic=True),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("problem", [*MIXED, *PACKED, *drawn(10, seed=3)], ids=lambda x: x.label)
def test_kernels_compile_without_spills(problem: Problem) -> None:
    assert sweep.check(problem) == []
