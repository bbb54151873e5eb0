"""The door for transformers: layers behind left padding."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from attngen.integrations import transformers as door

import attngen
from attngen.frontends.integrations import left_padded
from tests.support.mask_kit import PLANNED, B, D, dense_of, request_of

PADDED = [name for name in PLANNED if "behind padding" in name and "blocks" not in name]
HEADS, OF_KEYS = 4, 2
LAYER = types.SimpleNamespace()


def operands_of(case: str) -> list[torch.Tensor]:
    _, (rows, keys, *_), _ = PLANNED[case]
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, rows), (OF_KEYS, keys), (OF_KEYS, keys)
    return [torch.randn(B, *size, D, generator=generator) for size in sizes]


@pytest.mark.parametrize("learnable", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("tile", [0, left_padded.TILE], ids=["packed", "few queries"])
@pytest.mark.parametrize("case", PADDED)
def test_layers_see_what_the_mask_shows(
    case: str, tile: int, learnable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_padded, "TILE", tile)
    plan, operands = door.mask_of(**request_of(*PLANNED[case])), operands_of(case)
    sink = torch.linspace(-1, 1, HEADS) if learnable else None
    mask = dense_of(**request_of(*PLANNED[case]))
    given: dict[str, Any] = {"softmax": "learnable", "sink": sink} if learnable else {}
    wanted = attngen.attention(*operands, layout="bhsd", attn_mask=mask, **given)
    seen = mask.any(-1).transpose(1, 2)[..., None]
    for _ in range(2):
        found, _ = door.attend(LAYER, *operands, plan, s_aux=sink)
        torch.testing.assert_close(found * seen, wanted.transpose(1, 2) * seen)


def test_rows_without_keys_are_zero_beside_a_sink_of_no_weight() -> None:
    q, k, v = operands_of("step behind padding")
    sink = torch.tensor([-torch.inf, 0.5, -torch.inf, 1.0])
    begins = torch.tensor([k.shape[2], *range(B - 1)], dtype=torch.int32)
    arguments = {"softmax": "learnable", "sink": sink, "seqstart_kv": begins}
    found = left_padded.attend((q, k, v), arguments, None)
    wanted = attngen.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", **arguments)
    assert not found[0].any() and found[1].any()
    torch.testing.assert_close(found, wanted)
    arguments["sink"] = sink.requires_grad_()
    (d_sink,) = torch.autograd.grad(left_padded.attend((q, k, v), arguments, None).sum(), sink)
    assert d_sink.isfinite().all() and d_sink[[1, 3]].all() and not d_sink[[0, 2]].any()


def test_keys_of_steps_are_read_where_they_lie_and_lengths_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = door.mask_of(**request_of(*PLANNED["step behind padding"]))
    q, k, v = operands_of("step behind padding")
    asked: list[dict[str, Any]] = []

    def attention(*operands: torch.Tensor, **given: Any) -> torch.Tensor:
        asked.append({"operands": operands, **given})
        return attngen.attention(*operands, **given)

    monkeypatch.setattr(left_padded, "attention", attention)
    for keys in (k, k.transpose(1, 2).contiguous().transpose(1, 2), k):
        door.attend(LAYER, q, keys, v, plan)
    first, other, last = asked
    assert other["layout"] == "bshd" and "seqstart_kv" in other
    assert [x.data_ptr() for x in first["operands"][1:]] == [k.data_ptr(), v.data_ptr()]
    assert first["cu_seqlens_kv"] is last["cu_seqlens_kv"]
    assert len(first["cu_seqlens_kv"]) == B * OF_KEYS + 1


@pytest.mark.parametrize("case", ["causal behind padding", "step behind padding"])
def test_layers_behind_padding_have_gradients(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_padded, "TILE", 0)
    mask, gradients = dense_of(**request_of(*PLANNED[case])), []
    seen = mask.any(-1).transpose(1, 2)[..., None]
    for plan in (door.mask_of(**request_of(*PLANNED[case])), mask):
        operands = [x.requires_grad_() for x in operands_of(case)]
        out, _ = door.attend(LAYER, *operands, plan)
        (out * seen).square().sum().backward()
        gradients.append([x.grad for x in operands])
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


def test_dropout_keeps_heads_together() -> None:
    plan = door.mask_of(**request_of(*PLANNED["step behind padding"]))
    found, _ = door.attend(LAYER, *operands_of("step behind padding"), plan, dropout=0.5)
    assert found.shape == (B, 1, HEADS, D)


@pytest.mark.parametrize("case", ["causal behind padding", "step behind padding"])
def test_compiled_layers_compute_what_others_do(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_padded, "TILE", 0)
    plan, operands = door.mask_of(**request_of(*PLANNED[case])), operands_of(case)
    torch._dynamo.reset()
    layer = torch.compile(
        lambda *x: door.attend(LAYER, *x, plan)[0], backend="eager", fullgraph=True
    )
    found = layer(*operands)
    assert not plan.lengths
    torch.testing.assert_close(found, door.attend(LAYER, *operands, plan)[0])
    assert plan.lengths
