"""The door for transformers: layers' calls."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from attngen.integrations import transformers as door

import attngen
from attngen import SpecError
from tests.support.mask_kit import (
    PLANNED,
    H,
    dense_of,
    operands_of,
    request_of,
    whole,
)


def layer(**facts: Any) -> Any:
    return types.SimpleNamespace(**facts)


def test_scores_are_scaled_capped_and_have_sinks() -> None:
    q, k, v = operands_of(12, 12)
    sink = torch.tensor([0.5, -1.0])
    found, _ = door.attend(
        layer(), q, k, v, whole("causal"), scaling=0.3, softcap=5.0, s_aux=sink, dropout=0.0
    )
    given = {"softmax_scale": 0.3, "softcap": 5.0, "softmax": "learnable", "sink": sink}
    wanted = attngen.attention(q, k, v, layout="bhsd", mask="causal", **given)
    torch.testing.assert_close(found, wanted.transpose(1, 2))
    dropped, _ = door.attend(layer(), q, k, v, whole("causal"), dropout=0.5)
    assert dropped.shape == found.shape and (dropped - found).abs().max() > 0.01


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("case", ["causal", "encoder", "causal behind padding", "documents"])
def test_position_bias_is_added_beside_any_mask(case: str) -> None:
    q, k, v = operands_of(12, 12)
    bias = torch.randn(1, H, 12, 12, generator=torch.Generator().manual_seed(3))
    found, _ = door.attend(layer(), q, k, v, whole(case), position_bias=bias)
    mask = dense_of(**request_of(*PLANNED[case]))
    wanted = attngen.attention(q, k, v, layout="bhsd", attn_mask=mask, bias=bias).transpose(1, 2)
    seen = mask.any(-1).transpose(1, 2)[..., None]
    torch.testing.assert_close(found * seen, wanted * seen)


@pytest.mark.usefixtures("library")
def test_compiled_code_gets_blocks_as_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was made outside of it is a tensor there, where no kernels run functions."""
    q, k, v = operands_of(12, 12)
    plan, asked = whole("blocks"), []
    monkeypatch.setattr(door, "attention", lambda *x, **y: asked.append(y) or x[0])
    for compiling in (False, True):
        monkeypatch.setattr("torch.compiler.is_compiling", lambda found=compiling: found)
        door.attend(layer(), q, k, v, plan)
    outside, inside = asked
    assert outside["mask_mod"] is plan.arguments["mask_mod"] and "schedule" in outside
    assert not inside.keys() & {"mask_mod", "schedule"}
    assert torch.equal(inside["attn_mask"], dense_of(**request_of(*PLANNED["blocks"])))


def test_asking_for_weights_is_answered_once(caplog: pytest.LogCaptureFixture) -> None:
    door._said.clear()
    for _ in range(2):
        door.attend(layer(), *operands_of(12, 12), None, output_attentions=True)
    assert [each.getMessage()[:17] for each in caplog.records] == ["output_attentions"]


@pytest.mark.parametrize("kind", ["bool", "float", "float beside a bias"])
def test_tensors_of_users_are_masks(kind: str) -> None:
    q, k, v = operands_of(12, 12)
    mask = dense_of(**request_of(*PLANNED["causal"]))
    numbers = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    bias = torch.ones(1, H, 12, 12).tril() if "beside" in kind else None
    found, _ = door.attend(
        layer(), q, k, v, mask if kind == "bool" else numbers, position_bias=bias
    )
    wanted = attngen.attention(q, k, v, layout="bhsd", mask="causal", bias=bias)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize(
    ("facts", "given", "s_q", "same"),
    [
        ({}, {}, 12, {"mask": "causal"}),
        ({"is_causal": False}, {}, 12, {}),
        ({"is_causal": True}, {"is_causal": False}, 12, {}),
        ({}, {"sliding_window": 4}, 12, {"mask": "causal", "window": (3, 0)}),
        ({}, {}, 1, {}),
        ({}, {}, 5, {"mask": "causal"}),
    ],
    ids=["plain", "encoder", "told", "window", "step", "prompt of a fixed cache"],
)
def test_layers_without_a_mask_are_causal_if_they_say_so(facts, given, s_q, same) -> None:
    q, k, v = operands_of(s_q, 12)
    found, _ = door.attend(layer(**facts), q, k, v, None, **given)
    wanted = attngen.attention(q, k, v, layout="bhsd", **same)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


def test_mask_of_other_lengths_is_refused() -> None:
    q, k, v = operands_of(12, 9)
    with pytest.raises(SpecError, match="a mask of 12 keys came to a layer of 9"):
        door.attend(layer(), q, k, v, whole("causal"))
