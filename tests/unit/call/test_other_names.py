"""Calls that name an argument as another library does are told what it is here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.call.other_names import MORE, NAMES
from attngen.call.table import ROWS


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("is_causal", "pass mask='causal', or where the last query .* 'causal_bottom_right'"),
        ("scale", "did you mean 'softmax_scale'"),
        ("attn_bias", "did you mean 'bias'"),
        ("cache_seqlens", "did you mean 'seqused_kv'"),
        ("k_descale", "did you mean 'descale_k'"),
        ("enable_gqa", "leave it out: heads of k and v divide q's"),
        ("softcapp", "did you mean 'softcap'"),
    ],
)
def test_refusals_name_what_is_meant(name: str, meant: str) -> None:
    q, given = torch.zeros(1, 4, 1, 8), dict[str, Any]({name: None})
    with pytest.raises(TypeError, match=f"argument '{name}'; {meant}"):
        attngen.attention(q, q, q, **given)


def test_names_of_others_are_none_of_these_and_stand_for_some() -> None:
    assert {*NAMES.values()} <= {*ROWS}
    assert not ({*NAMES} | {*MORE}) & {*ROWS}
