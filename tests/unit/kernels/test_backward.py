"""Backward sets: plans that fit, kernels that may ship, parameters where the sources have them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from attngen.compiler.builder import build_problem, render_problem
from attngen.compiler.cache import Cache
from attngen.compiler.digest import cache_key
from attngen.errors import PlanError
from attngen.io.values import to_data
from attngen.kernels.base import KernelPlan
from attngen.kernels.plan import plan, plans, read_plan
from attngen.kernels.support.around import PreparePlan
from attngen.kernels.wgmma.backward import choices, registers
from attngen.kernels.wgmma.backward.plan import BackwardPlan
from attngen.targets.target import DEFAULT
from tests.support.sass import count_instructions
from tests.unit.kernels.test_render import offsets_in_cpp

ARCH = "sm_90a"
SMEM_BYTES = 227 * 1024
FUSED = ["bwd_prepare", "sm90_bwd", "bwd_convert"]
COMPLETED = ["bwd_prepare", "sm90_bwd"]
SPLIT = ["bwd_prepare", "sm90_bwd_dkv", "sm90_bwd_dq"]
KEPT = [*SPLIT, "sm90_bwd_dq_kept"]
DIMS = range(8, 257, 8)
CASES = {
    "d128 causal": {"head_dim": 128, "masks": ("causal",)},
    "d128 causal deterministic": {"head_dim": 128, "masks": ("causal",), "deterministic": True},
    "d64 full": {"head_dim": 64},
    "d8 window fp16": {"head_dim": 8, "masks": ("window",), "dtype": "fp16"},
    "d24v40 deterministic": {"head_dim": 24, "head_dim_v": 40, "deterministic": True},
    "d72v104 causal+window": {"head_dim": 72, "head_dim_v": 104, "masks": ("causal", "window")},
    "d72 window deterministic": {"head_dim": 72, "masks": ("window",), "deterministic": True},
    "d256 full": {"head_dim": 256},
    "d192v128 causal": {"head_dim": 192, "head_dim_v": 128, "masks": ("causal",)},
    "d8v256 window fp16": {"head_dim": 8, "head_dim_v": 256, "masks": ("window",), "dtype": "fp16"},
}
CASES |= {
    f"{case} {'+'.join(more)}": {**CASES[case], **dict.fromkeys(more, True)}
    for case, more in (
        ("d128 causal", ("dropout",)),
        ("d128 causal deterministic", ("dropout", "attn_mask")),
        ("d24v40 deterministic", ("dropout",)),
        ("d24v40 deterministic", ("attn_mask",)),  # in two kernels: the fused one would spill
        ("d256 full", ("dropout", "attn_mask")),
        ("d192v128 causal", ("attn_mask",)),
    )
}
EACH_CASE = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="session")
def make_backward(make_problem):
    """`make_backward(**arguments)` → the backward problem of `make_problem`'s arguments."""
    return lambda *arguments, **named: make_problem(*arguments, **named, direction="bwd")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masks", [(), ("causal",)])
def test_plans_every_head_dim_pair_fits_and_shares_one_workspace(
    masks, deterministic, make_backward
) -> None:
    for pair in itertools.product(DIMS, DIMS):
        problem = make_backward(*pair, masks, deterministic=deterministic)
        found = plans(problem, ARCH)
        fused = registers.fuses(problem)
        families = FUSED if fused else KEPT if max(pair) > 128 else SPLIT
        assert [each.family for each in found] == families
        assert len({each.row_block for each in found}) == 1
        for each in found:
            assert read_plan(to_data(each)) == each
            if not isinstance(each, BackwardPlan):
                continue
            assert each.deterministic == (deterministic and fused)
            assert each.smem_bytes <= SMEM_BYTES
            for region, following in itertools.pairwise(each.smem):
                assert region.offset + region.bytes <= following.offset
            taken = each.producer_registers + each.consumers * each.consumer_registers
            moved = 504 if each.consumers == 2 else 512
            assert taken <= moved and each.threads == 128 * (each.consumers + 1)


@pytest.mark.parametrize(
    "refused", [{"out": "fp32"}, {"dtype": "e4m3", "head_dim": 272}, {"head_dim": 528}], ids=str
)
def test_plans_without_kernels_are_refused_by_problem_and_arch(refused, make_backward) -> None:
    with pytest.raises(PlanError, match=f"{ARCH} has no backward"):
        plans(make_backward(**refused), ARCH)


def test_plans_unknown_architecture_is_refused_with_those_there_are(make_backward) -> None:
    with pytest.raises(PlanError, match="sm_75.*sm_90a"):
        plans(make_backward(), "sm_75")


def test_plans_forward_is_its_plan_and_a_backward_has_no_single_one(
    make_problem, make_backward
) -> None:
    assert plans(make_problem(256), ARCH) == (plan(make_problem(256), ARCH),)
    with pytest.raises(PlanError, match="several kernels"):
        plan(make_backward(), ARCH)


def test_read_plan_of_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="sm80_fwd.*bwd_prepare"):
        read_plan({"family": "sm80_fwd"})


@pytest.mark.slow
@pytest.mark.timeout(120)
@EACH_CASE
def test_build_problem_gives_fast_kernels_in_order_and_the_cache_keeps_each(
    case, make_backward, tmp_path: Path
) -> None:
    problem = make_backward(**CASES[case])
    cache = Cache(tmp_path)
    built = build_problem(problem, ARCH, cache=cache)
    assert [each.plan for each in built] == [*plans(problem, ARCH)]
    for each in built:
        kernel, resources = each.binary.kernel, each.binary.resources
        assert (resources.spill_bytes, resources.stack_bytes) == (0, 0), kernel.entry
        found = count_instructions(each.cubin)
        assert not found["STL"] and not found["LDL"], kernel.entry
        of_tiles = each.plan.family.startswith("sm90")
        assert bool(found["HGMMA"]) == bool(found["UTMALDG"]) == of_tiles, kernel.entry
        grids = {"mask_pack": "multiprocessors"}
        of_rows = grids.get(each.plan.family, "row_blocks")
        assert kernel.grid == ("persistent_tiles" if of_tiles else of_rows)
    again = build_problem(problem, ARCH, cache=cache)
    assert all(each.from_cache for each in again)
    assert [each.binary for each in again] == [each.binary for each in built]
    assert not cache.verify(lambda *key: render_problem(*key).sha256)


def test_cache_key_each_kernel_of_a_set_and_deterministic_differ(make_backward) -> None:
    keys = [
        cache_key(problem, each, ARCH).digest
        for deterministic in (False, True)
        for problem in [make_backward(128, deterministic=deterministic)]
        for each in plans(problem, ARCH)
    ]
    assert len(keys) == len(set(keys)) == 6


@EACH_CASE
def test_params_offsets_are_those_of_the_structs_in_the_kernels(
    case, make_backward, compile_cpp
) -> None:
    problem = make_backward(**CASES[case])
    for each in plans(problem, ARCH):
        source = render_problem(problem, each)
        kernel = source.kernel
        expected = [*(field.offset for field in kernel.fields), kernel.params_bytes]
        assert offsets_in_cpp(source.text, kernel.fields, compile_cpp) == expected
        assert f"sizeof(Params) == {kernel.params_bytes}" in source.text
        symbols = re.findall(r'extern "C" __global__ [^{;]*?(\w+)\(const', source.text)
        assert symbols == [kernel.entry]


@EACH_CASE
def test_kernel_entry_parameters_are_those_the_source_reads(case, make_backward) -> None:
    problem = make_backward(**CASES[case])
    for each in plans(problem, ARCH):
        source = render_problem(problem, each)
        names = {field.name for field in source.kernel.fields}
        read = set(re.findall(r"\bp\.(\w+)", source.text))
        unread = {"heads_kv"} if each.family == "sm90_bwd_dq" else set()
        assert read == names - unread
        assert {name for name in names if name.startswith("map_")} == {
            recipe.field for recipe in source.kernel.tensor_maps
        }
        assert ("turns" in names) == _has_turns(each)
        assert {*source.kernel.workspace} <= names


def _has_turns(each: KernelPlan) -> bool:
    """Where tiles sum dQ, each in its turn."""
    if isinstance(each, PreparePlan):
        return each.turns
    return each.family in ("sm90_bwd", "bwd_convert")


@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_deterministic_fused_plan_differs_in_wide_groups_and_held_keys(
    head_dim, make_backward
) -> None:
    def fused(**named) -> BackwardPlan:
        found = plans(make_backward(head_dim, **named), ARCH)
        return next(each for each in found if isinstance(each, BackwardPlan))

    plain, ordered = fused(), fused(deterministic=True)
    assert ordered.schedule.group_heads > plain.schedule.group_heads
    assert ordered.schedule.kv_group_bytes > plain.schedule.kv_group_bytes
    assert (plain.held_steps, ordered.held_steps) == ((3, 0) if head_dim == 128 else (0, 0))
    assert ordered == dataclasses.replace(
        plain, deterministic=True, schedule=ordered.schedule, held_steps=0
    )
    for named in ("dropout", "attn_mask"):  # which need registers: at 64 more than one kernel has
        family = fused(deterministic=True, **{named: True}).family
        assert family == ("sm90_bwd_dkv" if head_dim == 64 else "sm90_bwd")


PACKED = {"q_seq": "packed", "kv_seq": "packed"}
GATHERED = {"kv_fetch": "gather"}


@pytest.fixture(scope="session")
def main_plans(make_backward):
    """`main_plans(head_dim, fields, **arguments)` → the plans of the kernels that make gradients,
    of the problem of these arguments with fields replaced."""

    def found(head_dim, fields=None, **arguments) -> list[BackwardPlan]:
        problem = dataclasses.replace(make_backward(head_dim, **arguments), **(fields or {}))
        return [x for x in plans(problem, ARCH) if isinstance(x, BackwardPlan)]

    return found


@pytest.mark.parametrize(
    ("head_dims", "named", "fields", "held"),
    [
        ((128, 128), {}, {}, 3),
        ((128, 128), {"scores": ("alibi",)}, {}, 2),
        ((96, 96), {"scores": ("alibi",)}, {}, 3),
        ((128, 128), {"masks": ("causal", "window")}, {}, 3),
        ((128, 128), {"masks": ("causal", "window"), "deterministic": True}, {}, 3),
        ((128, 128), {"masks": ("causal", "window"), "deterministic": True}, PACKED, 2),
        ((96, 96), {"masks": ("causal", "window"), "deterministic": True}, {}, 3),
        ((128, 128), {"deterministic": True}, {}, 0),
        ((128, 128), {"scores": ("softcap",)}, {}, 0),
        ((128, 128), {"dropout": True}, {}, 0),
        ((128, 128), {"attn_mask": True}, {}, 0),
        ((128, 128), {}, GATHERED, 0),
        ((128, 128), {}, PACKED, 3),
        ((128, 96), {}, {}, 3),
        ((128, 96), {}, PACKED, 0),
        ((64, 64), {}, {}, 0),
    ],
)
def test_keys_are_held_where_registers_are_left_and_it_gains(
    head_dims, named, fields, held, main_plans
) -> None:
    d, d_v = head_dims
    (made,) = main_plans(d, fields, head_dim_v=d_v, **named)
    assert made.held_steps == held


def test_output_gradients_are_freed_early_with_128_queries_unless_completing_or_gathering(
    main_plans,
) -> None:
    def early(*arguments, **named) -> list[bool]:
        return [x.frees_early for x in main_plans(*arguments, **named)]

    assert early(64) == early(8, deterministic=True) == [True]
    assert early(128) == [False]
    assert early(256) == [False, False, False]
    assert early(64, GATHERED) == [False, False]
    assert early(64, masks=("causal", "window"), deterministic=True) == [False]


def test_rows_that_are_gathered_are_not_freed_early_even_where_one_kernel_had_room(
    main_plans, monkeypatch
) -> None:
    monkeypatch.setattr(registers, "FUSED_SPILLS", ())
    (gathered,) = main_plans(64, GATHERED)
    assert gathered.fused and not gathered.frees_early  # its loader brings D with output gradients


@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_orders_under_a_window_complete_dq_unless_registers_lack(head_dim, make_backward) -> None:
    def found(**named) -> tuple[KernelPlan, ...]:
        return plans(make_backward(head_dim, masks=("causal", "window"), **named), ARCH)

    prepare, main = found(deterministic=True)
    assert [prepare.family, main.family] == COMPLETED
    assert isinstance(prepare, PreparePlan) and prepare.zeros
    assert isinstance(main, BackwardPlan) and main.completes and main.deterministic
    # Room for a box of 64 rows of 64 columns in 16 bits.
    assert main.dq_columns * 4 >= 64 * 2
    assert [each.family for each in found()] == FUSED
    crowded = found(deterministic=True, attn_mask=True)
    assert all(not each.completes for each in crowded if isinstance(each, BackwardPlan))


@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_consumers_make_d_of_blocks_of_64_queries_in_an_order(head_dim, make_backward) -> None:
    def found(q_seq="dense", **named) -> tuple[PreparePlan, BackwardPlan]:
        named = {"masks": ("causal", "window"), "deterministic": True, **named}
        problem = make_backward(head_dim, **named)
        problem = dataclasses.replace(problem, q_seq=q_seq, kv_seq=q_seq)
        made = plans(problem, ARCH)
        (prepare,) = (each for each in made if isinstance(each, PreparePlan))
        return prepare, next(each for each in made if isinstance(each, BackwardPlan))

    prepare, main = found()
    assert main.makes_d == (head_dim > 64)
    assert prepare.made_tile == (main.tile.n if main.makes_d else 0)
    others = ({"masks": ("causal",)}, {"deterministic": False}, {"dropout": True})
    for named in (*others, {"q_seq": "packed"}, {"q_seq": "used"}):
        prepare, main = found(**named)
        assert not main.makes_d and not prepare.made_tile


def test_orders_are_two_where_the_second_completes_dq(make_backward) -> None:
    features = [{}, *({name: True} for name in ("dropout", "attn_mask", "deterministic"))]
    features += [{"scores": (name,)} for name in ("softcap", "alibi", "post_scale_bias")]
    fields = ({}, {"kv_fetch": "gather"}, {"q_seq": "packed", "kv_seq": "packed"})
    masks = ((), ("window",), ("causal", "window"))
    dims = (8, 64, 72, 128, 136)
    two = 0
    for d, d_v, masked, more, changed in itertools.product(dims, dims, masks, features, fields):
        problem = make_backward(d, head_dim_v=d_v, masks=masked, **more)
        problem = dataclasses.replace(problem, **changed)
        orders = problem.orders()
        assert orders[0] == problem
        ordered = dataclasses.replace(problem, deterministic=True)
        found = choices.plans(ordered, DEFAULT)
        completes = any(getattr(each, "completes", False) for each in found)
        wanted = completes and not problem.deterministic
        assert orders[1:] == ((ordered,) if wanted else ()), problem.label
        two += wanted
    assert two > 50


@pytest.mark.parametrize("named", [{}, {"deterministic": True}], ids=str)
def test_ctas_draw_even_their_first_tiles_where_others_wait_for_these(named, make_backward) -> None:
    """Else all wait for a CTA that may itself wait for an SM which another kernel has."""
    for sequence in ("dense", "packed"):
        problem = make_backward(128, **named)
        problem = dataclasses.replace(problem, q_seq=sequence, kv_seq=sequence)
        main = next(each for each in plans(problem, ARCH) if each.family == "sm90_bwd")
        assert ("blockIdx" in render_problem(problem, main).text) == (not named)


def test_deterministic_split_kernels_are_those_of_any_order(make_backward) -> None:
    """They add nothing to dQ from several tiles: only their names tell them apart."""
    problem = make_backward(256)
    ordered = dataclasses.replace(problem, deterministic=True)
    for free, fixed in zip(plans(problem, ARCH), plans(ordered, ARCH), strict=True):
        assert free == fixed
