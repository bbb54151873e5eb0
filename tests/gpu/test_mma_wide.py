"""Head dims above 256 by products of warps, which divide the output's columns, against float64."""

from __future__ import annotations

import pytest

from attngen.errors import AttngenError
from attngen.kernels.mma_sync.forward import choices
from tests.support.caches import kernels_of

from . import oracle, test_decode, test_forward_onto, test_forward_wide, test_paged_prompt, varlen
from .conftest import any_chip

pytestmark = pytest.mark.gpu
ARCH = any_chip() or "sm_90"
CASES, CALLS = test_forward_wide.CASES, test_forward_wide.CALLS


@pytest.fixture(autouse=True)
def forced():
    """Calls run kernels of this target."""
    with kernels_of(ARCH) as launched:
        yield
    assert launched <= {"mma_fwd", "mask_pack", "mma_decode", "combine"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mma_forward_of_wide_heads_is_right(case):
    oracle.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_mma_forward_of_wide_heads_with_features_and_lengths_is_right(call):
    varlen.check_forward(call)


@pytest.mark.parametrize("page", [3, 64])
@pytest.mark.parametrize("dims", test_forward_wide.PAGED_DIMS[:3], ids=str)
def test_mma_wide_prompt_over_pages_is_right(dims, page):
    pages = test_decode.cache([300, 0, 128], 1, dims[0], page, dims[1])
    test_decode.check(test_decode.queries(3, 130, 2, dims[0]), pages, mask="causal_bottom_right")


def test_mma_bias_and_dropout_of_wide_heads_over_pages_are_right():
    pages = test_decode.cache([200, 0, 128, 201], 2, 512, 16)
    more = test_paged_prompt.MORE[1]
    given = test_paged_prompt.beside(more, 130, pages.table.shape[1] * 16, 1)
    q = test_decode.queries(4, 130, 4, 512)
    test_decode.check(q, pages, mask="causal_bottom_right", **given)


@pytest.mark.parametrize("choice", choices.WIDE_CHOICES, ids=str)
def test_mma_forward_of_wide_heads_in_tiles_of_other_chips_is_right(choice, monkeypatch):
    """Chips with less shared memory have them."""
    monkeypatch.setattr(choices, "CHOICES", (choice,))
    monkeypatch.setattr(choices, "WIDE_CHOICES", ())
    d, d_v = (320, 320) if choice.parts > 1 else (512, 64)
    for call in (
        varlen.Call("thd", (70, 0, 130), (7, 30, 200), gaps=True, d=d, d_v=d_v, mask="causal"),
        varlen.Call("bshd", (130,), (200,), d=d - 8, d_v=d_v - 7, heads=(2, 1),
                    more=varlen.Features(bias="post_scale", dropout=0.1)),
    ):  # fmt: skip
        varlen.check_forward(call)


def test_mma_forward_of_wide_heads_refuses_to_join():
    with pytest.raises(AttngenError, match="more than 256 columns that joins another"):
        test_forward_onto.test_sums_that_nobody_wants_are_not_written((512, 512))
    test_forward_onto.test_sums_that_nobody_wants_are_not_written((320, 72))
