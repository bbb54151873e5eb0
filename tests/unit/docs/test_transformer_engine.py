"""docs/guide/transformer-engine.md: its function computes what TransformerEngine's masks mean."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "transformer-engine.md").read_text()
BATCH, QUERIES, KEYS, HEADS, DIM = 3, 6, 9, 4, 16


@pytest.fixture(scope="module")
def dot_product_attention() -> Callable[..., Tensor]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(code, names)
    return names["dot_product_attention"]


def hidden_of(rule: str, attention_mask: object, window: tuple[int, int], corner: bool) -> Tensor:
    """[b, h, s_q, s_kv]: what TransformerEngine says is masked out, position by position."""
    queries, keys = torch.full((BATCH,), QUERIES), torch.full((BATCH,), KEYS)
    if "padding" in rule:
        queries, keys = ((~x).sum(-1).flatten() for x in attention_mask)  # type: ignore[attr-defined]
    hidden = torch.zeros(BATCH, HEADS, QUERIES, KEYS, dtype=torch.bool)
    for b in range(BATCH):
        for i in range(QUERIES):
            for j in range(KEYS):
                diagonal = i + (int(keys[b] - queries[b]) if corner else 0)
                seen = int(i < queries[b] and j < keys[b])
                seen &= "causal" not in rule or j <= diagonal
                seen &= window[0] < 0 or j >= diagonal - window[0]
                seen &= window[1] < 0 or j <= diagonal + window[1]
                hidden[b, :, i, j] = not seen
    return hidden | attention_mask if rule == "arbitrary" else hidden


def padding(lengths: list[int], most: int) -> Tensor:
    return (torch.arange(most) >= torch.tensor(lengths)[:, None]).view(BATCH, 1, 1, most)


@pytest.mark.parametrize(
    ("rule", "given", "window", "corner"),
    [
        ("no_mask", None, (-1, -1), True),
        ("no_mask", None, (2, 1), True),
        ("no_mask", False, (2, 1), False),
        ("causal", None, (-1, -1), False),
        ("causal", True, (2, 0), False),  # whatever is asked for
        ("causal_bottom_right", None, (3, 0), True),
        ("padding", None, (2, 2), True),
        ("padding", False, (2, 2), False),
        ("padding,causal", None, (-1, -1), False),
        ("causal,padding", None, (-1, -1), False),
        ("padding_causal", None, (4, 0), False),
        ("padding_causal_bottom_right", None, (-1, -1), True),
        ("arbitrary", None, (-1, -1), True),
        ("arbitrary", False, (1, 2), False),
    ],
)
def test_function(
    dot_product_attention: Callable[..., Tensor],
    rule: str,
    given: bool | None,
    window: tuple[int, int],
    corner: bool,
) -> None:
    torch.manual_seed(0)
    q = torch.randn(QUERIES, BATCH, HEADS, DIM)
    k, v = torch.randn(2, KEYS, BATCH, HEADS, DIM)
    attention_mask = None
    if rule == "arbitrary":
        attention_mask = torch.rand(BATCH, 1, QUERIES, KEYS) < 0.4
    elif "padding" in rule:
        attention_mask = (padding([6, 4, 1], QUERIES), padding([9, 5, 3], KEYS))
    out = dot_product_attention(
        q, k, v, attention_mask, attn_mask_type=rule, window_size=window,
        bottom_right_diagonal=given,
    )  # fmt: skip
    hidden = hidden_of(rule, attention_mask, window, corner)
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) / math.sqrt(DIM)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0)
    expected = torch.einsum("bhij,jbhd->ibhd", weights, v).flatten(-2)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_mask_of_both(dot_product_attention: Callable[..., Tensor]) -> None:
    """One padding mask serves queries and keys."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, KEYS, BATCH, HEADS, DIM)
    mask = padding([9, 5, 3], KEYS)
    both = dot_product_attention(q, k, v, (mask, mask), attn_mask_type="padding")
    torch.testing.assert_close(dot_product_attention(q, k, v, mask, attn_mask_type="padding"), both)
