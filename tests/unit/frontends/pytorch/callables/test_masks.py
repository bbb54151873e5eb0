"""Masks of callables as booleans, against the callables themselves."""

from __future__ import annotations

import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen
from attngen.frontends.pytorch.callables import calls as callables
from attngen.frontends.pytorch.callables import mask as callable_mask
from attngen.frontends.pytorch.callables.listed import facts_of
from attngen.frontends.pytorch.callables.mask import Sizes, in_all, listed_by, places_of, shown_by
from attngen.frontends.pytorch.callables.program import Traced, mask_program
from attngen.frontends.pytorch.callables.trace import trace
from tests.support.callables_kit import MASKS, B, H, S, ScoreMod

CPU = torch.device("cpu")
SIZES = Sizes(B, H, S, S)
PLANES = {"documents": "b", "growing_reach": "bh"}


def traced(mod: ScoreMod) -> Traced:
    return mask_program(trace("mask_mod", mod, CPU))


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_the_callable_in_as_few_planes_as_it_has(name) -> None:
    mod = MASKS[name]()
    found = traced(mod)
    shown = shown_by(found, SIZES, CPU)
    on = PLANES.get(name, "")
    assert places_of(found.program) == frozenset(on)
    assert shown.shape == (B if "b" in on else 1, H if "h" in on else 1, S, S)
    each = [torch.arange(n, dtype=torch.int32) for n in (B, H, S, S)]
    places = torch.cartesian_prod(*each).unbind(1)
    wanted = torch.vmap(mod)(*places).view(B, H, S, S)
    assert torch.equal(shown.expand(B, H, S, S), wanted)
    with mock.patch.object(callable_mask, "MOST_AT_ONCE", 7 * S + 1):
        assert torch.equal(shown_by(found, SIZES, CPU), shown)


@pytest.mark.parametrize("name", ["chunks", "growing_reach"])
def test_pairs_of_a_block_mask_are_those_of_its_function(name) -> None:
    mod = MASKS[name]()
    made = create_block_mask(mod, B, H, S, S, device="cpu", BLOCK_SIZE=16)
    partial, full = listed_by(made, SIZES)
    shown = shown_by(traced(mod), SIZES, CPU)
    assert torch.equal(((partial & shown) | full).expand(B, H, S, S), shown.expand(B, H, S, S))
    assert partial.any() and not (partial & full).any()


def test_masks_that_are_too_large_or_no_masks_are_refused() -> None:
    found = traced(MASKS["growing_reach"]())
    with (
        mock.patch.object(callable_mask, "MOST_BYTES", B * H * S * S - 1),
        pytest.raises(attngen.SpecError, match="mask_mod over 96 x 96 pairs of 8 planes"),
    ):
        shown_by(found, SIZES, CPU)
    with pytest.raises(attngen.SpecError, match="mask_mod needs to return a bool a position"):
        traced(lambda b, h, i, j: i - j)
    with pytest.raises(attngen.SpecError, match="mask_mod branches on a tensor at test_masks.py"):
        traced(lambda b, h, i, j: i >= j if b > 0 else i == j)


def test_masks_in_use_are_shared_while_what_they_read_stays_as_it_is() -> None:
    document = torch.arange(S) // 20
    sizes = Sizes(1, 1, S, S)

    def mod(b, h, i, j):
        return document[i] == document[j]

    masks = callable_mask.Masks()
    with mock.patch.object(callables, "_known", {}):

        def shown(sizes: Sizes = sizes) -> torch.Tensor:
            callables._traced("mask_mod", mod, CPU)
            return masks.of(shown_by, callables._traced("mask_mod", mod, CPU), sizes, CPU)

        first = shown()
        assert shown() is first and shown(Sizes(1, 1, S, 9)) is not first
        document += torch.arange(S) % 2
        second = shown()
        assert second is not first and not torch.equal(first, second)
        place = second.data_ptr()
        del second
        assert not any(mask() is not None and mask().data_ptr() == place for mask, _ in
                       masks.made.values())  # fmt: skip
        document = document.clone()
        first = shown()
        assert shown() is first
        document.data = document.flip(0)  # which torch counts as no change
        assert shown() is not first


def test_masks_of_lists_with_and_without_whole_blocks_are_two() -> None:
    document = torch.arange(S) // 20
    found = replace(traced(lambda b, h, i, j: document[i] == document[j]), key=("documents",))
    lists, masks = [torch.zeros(1) for _ in range(4)], callable_mask.Masks()

    def shown(count: int) -> torch.Tensor:
        read = replace(found, sources=(*found.sources, *lists[:count]))
        return masks.of(shown_by, read, SIZES, CPU)

    first = shown(2)
    second = shown(4)
    assert second is not first and shown(4) is second


def test_what_is_known_of_calls_holds_no_schedule() -> None:
    facts = [facts_of({"q": torch.zeros(1), "schedule": attngen.Schedule()}) for _ in range(2)]
    assert facts[0] == facts[1] == facts_of({"q": torch.zeros(1)})


def test_numbers_beyond_the_ints_of_positions_are_refused() -> None:
    with pytest.raises(attngen.SpecError, match="mask_mod computes with 2147483648 in int32"):
        traced(lambda b, h, i, j: i + 2**31 > j)


def test_schedules_hold_a_few_masks_until_they_are_reset() -> None:
    kept = attngen.Schedule()
    first, *others = (torch.zeros(1) for _ in range(5))
    kept.keep(first)
    kept.keep(first)
    held = weakref.ref(first)
    del first
    for each in others[:3]:
        kept.keep(each)
    assert held() is not None
    kept.keep(others[3])
    assert held() is None
    last = weakref.ref(others[3])
    del each, others
    kept.reset()
    assert last() is None


def test_masks_that_reach_beyond_each_other_show_what_all_show() -> None:
    one, other = torch.rand(2, 1, 5, 9) < 0.7, torch.rand(3, 7, 6) < 0.7
    keys = torch.rand(8) < 0.7
    wanted = one[..., :6] & other[:, :5] & keys[:6]
    assert torch.equal(in_all([one, other, keys]), wanted)
    assert torch.equal(in_all([keys[:, None], keys]), keys[:, None] & keys)
