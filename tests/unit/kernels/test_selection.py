"""Selection: the kernels that make what is wanted, found by what each reads and makes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from attngen import AttentionSpec
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.kernels.plan import plans
from attngen.kernels.selection import made_by, maker_of, name_of, of_call, read_by, select
from attngen.runtime.program import KernelEntry
from attngen.spec.resolve import resolve
from attngen.targets.target import DEFAULT

GRADIENTS = ("dq", "dk", "dv", "dbias", "lse_log2", "d")


@dataclass(frozen=True)
class Loaded:
    """A kernel by its launch description alone."""

    kernel: KernelEntry


def kernels_of(**fields: object) -> tuple[Loaded, ...]:
    """The kernels of a spec of one direction."""
    problem, *_ = resolve(AttentionSpec(**fields), features.scan())  # type: ignore[arg-type]
    made = (render_problem(problem, each) for each in plans(problem, DEFAULT.name))
    return tuple(Loaded(each.kernel) for each in made)


def names(found: Sequence[Loaded]) -> list[str]:
    return [name_of(each.kernel) for each in found]


def backward(head_dim: int = 64, **fields: object) -> tuple[Loaded, ...]:
    return kernels_of(head_dim=head_dim, mask="causal", directions=("bwd",), **fields)


@pytest.mark.parametrize(
    ("head_dim", "fields", "wanted", "launched"),
    [
        (64, {}, ("dq", "dk", "dv"), ["bwd_prepare", "sm90_bwd", "bwd_convert"]),
        (64, {}, ("dk", "dv"), ["bwd_prepare", "sm90_bwd"]),
        (64, {}, ("dq",), ["bwd_prepare", "sm90_bwd", "bwd_convert"]),
        (64, {}, ("lse_log2", "d"), ["bwd_prepare"]),
        (64, {}, (), []),
        (64, {"window": True, "deterministic": True}, ("dq",), ["bwd_prepare", "sm90_bwd"]),
        (256, {}, ("dq", "dk", "dv"), ["bwd_prepare", "sm90_bwd_dkv", "sm90_bwd_dq_kept"]),
        (
            256,
            {"layout": "thd"},
            ("dq", "dk", "dv"),
            ["varlen_prepare", "bwd_prepare", "sm90_bwd_dkv", "sm90_bwd_dq"],
        ),
        (256, {}, ("dk", "dv"), ["bwd_prepare", "sm90_bwd_dkv"]),
        (256, {}, ("dq",), ["bwd_prepare", "sm90_bwd_dq"]),
        (256, {"attn_mask": True}, ("dq",), ["bwd_prepare", "mask_pack", "sm90_bwd_dq"]),
        (256, {"attn_mask": True}, ("lse_log2", "d"), ["bwd_prepare"]),
        (
            64,
            {"layout": "thd"},
            ("dk", "dv"),
            ["varlen_prepare", "bwd_prepare", "sm90_bwd"],
        ),
    ],
    ids=str,
)
def test_kernels_are_those_that_make_what_is_wanted(head_dim, fields, wanted, launched) -> None:
    assert names(select(backward(head_dim, **fields), wanted)) == launched


def test_a_given_value_needs_no_kernel() -> None:
    found = select(backward(layout="thd"), ("dk", "dv"), given=("kv_schedule",))
    assert names(found) == ["bwd_prepare", "sm90_bwd"]


def test_a_kernel_that_makes_more_is_taken_where_all_of_it_is_wanted() -> None:
    kernels = backward(128, bias="post_scale")
    assert {"sm90_bwd", "sm90_bwd_with_dbias", "sm90_bwd_dbias"} <= {*names(kernels)}
    around = ["bwd_prepare", "bwd_row_sums"]
    both = select(kernels, ("dq", "dk", "dv", "dbias"))
    assert names(both) == [*around, "sm90_bwd_with_dbias", "bwd_convert"]
    assert names(select(kernels, ("dq", "dk", "dv"))) == [*around, "sm90_bwd", "bwd_convert"]
    assert names(select(kernels, ("dbias",))) == [*around, "sm90_bwd_dbias"]
    beside = {"sm90_bwd_with_dbias", "sm90_bwd_with_bias_sums"}
    assert beside <= {*names(kernels)}
    fewer = [each for each in kernels if name_of(each.kernel) not in beside]
    both = select(fewer, ("dq", "dk", "dv", "dbias"))
    assert names(both) == [*around, "sm90_bwd", "bwd_convert", "sm90_bwd_dbias"]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fields", [{}, {"bias": "post_scale"}, {"layout": "thd"}], ids=str)
def test_kernels_that_are_selected_read_what_others_make_before_them(head_dim, fields) -> None:
    kernels = backward(head_dim, **fields)
    made = {value for each in kernels for value in made_by(each.kernel)}
    for count in range(len(GRADIENTS) + 1):
        for wanted in itertools.combinations(GRADIENTS, count):
            found, written = select(kernels, wanted), set()
            for each in found:
                assert read_by(each.kernel) & made <= written
                written |= made_by(each.kernel)
            assert written >= made & {*wanted}
            for each in found:  # none is there for nothing
                others = [x for x in found if x is not each]
                left = {value for x in others for value in made_by(x.kernel)}
                needed = {*wanted}.union(*(read_by(x.kernel) for x in others)) & made
                assert not needed <= left


def test_parts_are_joined_where_there_are_several() -> None:
    kernels = kernels_of(head_dim=64, decode=True)
    assert names(select(kernels, ("o",))) == ["sm90_decode", "combine"]
    assert names(select(kernels, ("o_parts",))) == ["sm90_decode"]


def test_a_kernel_of_no_family_is_launched_in_any_case() -> None:
    prepare, main, *_ = backward()
    strange = Loaded(replace(prepare.kernel, entry="sm70_prepare__full__0"))
    assert made_by(strange.kernel) == frozenset()
    assert select((strange, prepare, main), ("lse_log2",)) == (strange, prepare)
    assert of_call((strange, main), lambda each: name_of(each.kernel), "sm90_fwd") == [
        strange,
        main,
    ]


def test_maker_of_a_value_is_the_kernel_that_writes_it_whole() -> None:
    prepare, main, convert = backward(layout="thd")[1:]
    assert maker_of("lse_log2", (main, prepare)) is prepare
    assert maker_of("dq", (prepare, main, convert)) is convert  # others fill rows of none
    assert maker_of("dq", (prepare, main)) is None
    assert maker_of("dk", (convert, main)) is main
