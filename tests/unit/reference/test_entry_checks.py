"""Entries of integer tensors that cannot be right are named, with what is allowed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attngen
from attngen import SpecError
from attngen.frontends.pytorch import routing as choice
from attngen.reference.entry_checks import MOST_NAMED, longest_ascent

LOWEST, HIGHEST = -(1 << 31), (1 << 31) - 1
TOKENS = 60


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def packed(**lengths: tuple[int, ...]) -> dict:
    """A call of packed tokens; what is not given is right."""
    right = (0, 10, 20, 30, 45, 60)
    given = {"cu_seqlens_q": right, "cu_seqlens_kv": right, **lengths}
    x = torch.randn(TOKENS, 1, 8)
    found = {name: int32(*numbers) for name, numbers in given.items()}
    return {"q": x, "k": x, "v": x, "layout": "thd", **found}


def dense(**lengths: tuple[int, ...]) -> dict:
    x = torch.randn(3, 16, 1, 8)
    return {"q": x, "k": x, "v": x, **{name: int32(*n) for name, n in lengths.items()}}


def paged(
    table: list[list[int]], used: tuple[int, ...], other: list[list[int]] | None = None
) -> dict:
    pages = torch.randn(5, 4, 1, 8)
    tables = int32(*itertools.chain(*table)).view(2, 2)
    both = tables if other is None else (tables, int32(*itertools.chain(*other)).view(2, 2))
    return {
        "q": torch.randn(2, 1, 1, 8), "k": pages, "v": pages, "layout": "paged_kv_bshd_bshd_bshd",
        "page_table": both, "seqused_kv": int32(*used),
    }  # fmt: skip


WRONG = {
    "lowest": (
        packed(cu_seqlens_q=(0, 10, LOWEST, 30, 45, 60)),
        ["cu_seqlens_q[2]=-2147483648", "10..30"],
    ),
    "highest": (
        packed(cu_seqlens_kv=(0, 10, 20, HIGHEST, 45, 60)),
        ["cu_seqlens_kv[3]=2147483647", "20..45"],
    ),
    "beyond": (packed(cu_seqlens_q=(0, 10, 20, 30, 45, 61)), ["cu_seqlens_q[5]=61", "45..60"]),
    "far ahead": (packed(cu_seqlens_q=(0, 10, 50, 30, 45, 60)), ["cu_seqlens_q[2]=50", "10..30"]),
    "far behind": (packed(cu_seqlens_q=(0, 10, 20, 5, 45, 60)), ["cu_seqlens_q[3]=5", "20..45"]),
    "first": (packed(cu_seqlens_q=(-1, 10, 20, 30, 45, 60)), ["cu_seqlens_q[0]=-1", "0..10"]),
    "offset over another": (
        packed(cu_seqlens_q=(0, 5, 10, 15, 20, 25), cu_seqlens_q_padded=(0, 10, 12, 30, 45, 60)),
        ["cu_seqlens_q_padded[2]=12", "15..25"],
    ),
    "offset beyond": (
        packed(cu_seqlens_kv=(0, 5, 10, 15, 20, 25), cu_seqlens_kv_padded=(0, 10, 20, 30, 56, 60)),
        ["cu_seqlens_kv_padded[4]=56", "35..55"],
    ),
    "used": (dense(seqused_q=(16, -5, 3)), ["seqused_q[1]=-5", "0..16"]),
    "used, too many": (dense(seqused_kv=(16, 3, 17)), ["seqused_kv[2]=17", "0..16"]),
    "dense, cumulative": (dense(cu_seqlens_kv=(0, 16, 33, 40)), ["cu_seqlens_kv[2]=33", "16..32"]),
    "page": (paged([[0, 1], [5, 9]], (8, 4)), ["page_table[1, 0]=5", "5 pages", "0..4"]),
    "page of V": (paged([[0, 1], [2, 3]], (8, 4), [[0, -1], [2, 3]]), ["page_table of V[0, 1]=-1"]),
    "room of pages": (paged([[0, 1], [2, 3]], (8, HIGHEST)), ["seqused_kv[1]=2147483647", "0..8"]),
}  # fmt: skip


@pytest.mark.parametrize("checked", ["by the reference", "before kernels"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_entry_is_named(name, checked, monkeypatch):
    arguments, words = WRONG[name]
    backend = "reference"
    if checked == "before kernels":
        monkeypatch.setattr(choice, "CHECK_VALUES", True)
        monkeypatch.setattr(choice, "device_arch", lambda _: "sm_90a")
        backend = "cuda"
    with pytest.raises(SpecError) as caught, torch.no_grad():
        attngen.attention(**arguments, backend=backend)
    (reason,) = caught.value.reasons
    assert all(word in reason for word in words), reason


def test_right_entries_are_not_named():
    attngen.attention(**packed(), backend="reference")
    attngen.attention(**packed(cu_seqlens_q=(0, 0, 60, 60, 60, 60)), backend="reference")
    attngen.attention(**dense(seqused_q=(0, 16, 3)), backend="reference")
    with torch.no_grad():
        attngen.attention(**paged([[0, 1], [4, 99]], (8, 4)), backend="reference")


def test_many_wrong_entries_are_named_in_part():
    wrong = packed(cu_seqlens_q=tuple(range(-20, -5)), cu_seqlens_kv=(0,) * 15)
    with pytest.raises(SpecError) as caught:
        attngen.attention(**wrong, backend="reference")
    *named, rest = caught.value.reasons
    assert len(named) == MOST_NAMED and rest == "7 more entries like these"


@given(st.lists(st.integers(-4, 4), max_size=9))
def test_longest_ascent_is_the_longest(values):
    found = longest_ascent([*enumerate(values)])
    kept = [values[i] for i in sorted(found)]
    assert kept == sorted(kept)
    best = max(
        n
        for n in range(len(values) + 1)
        if any([*c] == sorted(c) for c in itertools.combinations(values, n))
    )
    assert len(kept) == best
