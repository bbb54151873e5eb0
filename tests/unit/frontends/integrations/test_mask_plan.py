"""Masks of transformers become arguments that say the same, where their functions say enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attngen.integrations import transformers as door
from torch import Tensor

import attngen
from attngen.frontends.integrations.mask_plan import PlannedMask, Request, structure_of
from tests.support.mask_kit import (
    BLOCKS,
    CAUSAL,
    DOCUMENTS,
    EVERYWHERE,
    LEFT,
    NO_PADDING,
    PLACES,
    PLANNED,
    STEP,
    WHOLE,
    Sizes,
    blocks,
    both_ways,
    chunks,
    counted,
    dense_of,
    documents,
    either,
    every,
    operands_of,
    padded,
    request_of,
    whole,
)


@pytest.mark.sampled(37)
@pytest.mark.parametrize("case", [*PLANNED, "again"])
def test_plan_says_what_the_mask_does(case: str) -> None:
    function, sizes, padding = PLANNED["causal" if case == "again" else case]
    given = request_of(function, sizes, padding)
    plan = door.mask_of(**given)
    assert isinstance(plan, PlannedMask) and "attn_mask" not in plan.arguments
    if case == "again":  # as `generate` hands a mask back
        assert door.mask_of(**given | {"attention_mask": plan}) is plan
    mask = dense_of(**given)
    assert plan.shape == tuple(mask.shape) and plan.ndim == mask.ndim
    q, k, v = operands_of(*sizes[:2])
    found, weights = door.attend(None, q, k, v, plan, backend="reference")
    wanted = attngen.attention(q, k, v, layout="bhsd", attn_mask=mask, backend="reference")
    seen = mask.any(-1).transpose(1, 2)
    if padding is not None and sizes[0] > 1:  # what queries of padding see, nobody reads
        places = torch.arange(sizes[0]) + sizes[2]
        seen = seen & padding[:, places][..., None] if function is not EVERYWHERE else seen
    assert weights is None and seen.any()
    torch.testing.assert_close(
        *(x * seen[..., None] for x in (found, wanted.transpose(1, 2))), atol=1e-5, rtol=1e-5
    )


MIXED = either(CAUSAL, lambda b, h, i, j: j < 2)
DENSE: dict[str, tuple[Any, Sizes, Tensor | None]] = {
    "another function": (lambda b, h, i, j: (j <= i) | (j < 2), WHOLE, None),
    "a union": (MIXED, WHOLE, None),
    "part of an intersection": (every(CAUSAL, MIXED), WHOLE, None),
    "padding with holes": (CAUSAL, WHOLE, padded((0, 12), (0, 12)) & (torch.arange(12) != 4)),
    "chunks of a rolling cache": (
        every(chunks(4, NO_PADDING), CAUSAL),
        (1, 4, 20, 17),
        None,
    ),
    "chunks at a place of their own, keys that end early": (
        every(chunks(4, NO_PADDING), CAUSAL),
        (4, 12, 5, 0),
        padded((0, 10), (0, 9)),
    ),
    "a window that is not causal, at a tensor's place": (
        both_ways(3),
        (1, 12, torch.tensor(6), 0),
        None,
    ),
    "keys behind the queries of padded sequences": (both_ways(3), (4, 12, 5, 0), LEFT),
    "positions without documents": (counted(CAUSAL, PLACES), WHOLE, None),
    "blocks of a single query": (either(CAUSAL, blocks(BLOCKS)), STEP, None),
    "blocks at a tensor's place": (
        either(CAUSAL, blocks(BLOCKS)),
        (2, 12, torch.tensor(6), 0),
        None,
    ),
    "blocks of chunks": (
        every(chunks(4, NO_PADDING), either(CAUSAL, blocks(BLOCKS))),
        WHOLE,
        None,
    ),
    "blocks by positions in documents": (
        every(counted(either(CAUSAL, blocks(BLOCKS)), PLACES), documents(DOCUMENTS)),
        WHOLE,
        None,
    ),
    "a union of two bands": (either(CAUSAL, both_ways(3)), WHOLE, None),
    "a union with chunks": (either(chunks(4, NO_PADDING), blocks(BLOCKS)), WHOLE, None),
    "two sizes of chunks": (every(chunks(4, NO_PADDING), chunks(6, NO_PADDING)), WHOLE, None),
}


@pytest.mark.usefixtures("library")
@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", [*DENSE, "while torch.compile traces"])
def test_other_masks_stay_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, sizes, padding = DENSE.get(case, (CAUSAL, WHOLE, None))
    if case not in DENSE:
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    given = request_of(function, sizes, padding)
    found = door.mask_of(**given)
    assert isinstance(found, Tensor) and torch.equal(found, dense_of(**given))


def test_functions_of_other_modules_have_no_structure() -> None:
    def causal_mask_function(b, h, i, j):
        return j <= i

    causal_mask_function.__qualname__ = "causal_mask_function"
    assert structure_of(causal_mask_function) is None
    assert structure_of(CAUSAL).right == 0


def test_numbers_of_sequences_are_made_once_on_the_device() -> None:
    request = Request(**request_of(*PLANNED["causal"]), device="cpu")
    for number in (3, torch.tensor(3)):
        assert request.of_all(number).tolist() == [3, 3]
        assert request.of_all(number).dtype == torch.int32


@pytest.mark.usefixtures("library")
def test_plan_becomes_the_mask_for_code_that_takes_a_tensor() -> None:
    plan, mask = whole("causal"), dense_of(**request_of(*PLANNED["causal"]))
    assert plan.dtype == torch.bool and torch.equal(plan[..., :5], mask[..., :5])
    assert torch.equal(torch.cat([plan, mask], 1), torch.cat([mask, mask], 1))
    assert torch.equal(torch.where(mask, input=plan, other=mask), mask)
    assert not hasattr(plan, "_nothing")
    with pytest.raises(AttributeError, match="nothing"):
        plan.nothing  # noqa: B018  # as tensors have none
