"""The doors for flash-attention 2 and 3 over a cache: new tokens, angles, rows, pages, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attngen.integrations import flash_attn as two
from attngen.integrations import flash_attn_interface as three

from attngen import SpecError
from attngen.frontends.integrations import flash
from tests.support.flash_kit import (
    D_V,
    H_KV,
    HERE,
    B,
    D,
    H,
    alike,
    angles,
    cache_of,
    of_batch,
    randn,
    truth,
    turned,
)


@pytest.mark.parametrize("door", [two, three], ids=["two", "three"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_new_tokens_are_rotated_and_appended(door, causal: bool, interleaved: bool) -> None:
    """To rows that are looked up; queries of a call without a mask turn as the first one does."""
    caches, used = cache_of(), [5, 2]
    q, k, v = (randn(B, 3, n, D, seed=s).float() for s, n in ((3, H), (4, H_KV), (5, H_KV)))
    given = {"cache_seqlens": torch.tensor(used), "cache_batch_idx": torch.tensor([1, 0])}
    kept = [x.clone() for x in caches]
    out, lse = door.flash_attn_with_kvcache(
        *(q, *caches, k, v),
        **given,
        **angles(D),
        causal=causal,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **HERE,
    )
    for b, (n, row) in enumerate(zip(used, (1, 0), strict=True)):
        places = torch.arange(n, n + 3)
        new = turned(k[b], *angles(D).values(), places, interleaved)
        keys = torch.cat([kept[0][row, :n].double(), new])
        values = torch.cat([kept[1][row, :n], v[b]]).double()
        queries = places if causal else torch.full_like(places, n)
        query = turned(q[b], *angles(D).values(), queries, interleaved)
        alike((out[b], lse[b]), truth(query, keys, values, causal=causal))
        alike([x[row, : n + 3] for x in caches], (keys, values))


@pytest.mark.parametrize("door", [two, three], ids=["two", "three"])
def test_cache_of_equal_lengths_and_of_all_rows(door) -> None:
    q, caches = randn(B, 2, H, D).float(), cache_of()
    for rows, given in ((7, {"cache_seqlens": 7}), (12, {}), (12, {"num_splits": 1})):
        found = door.flash_attn_with_kvcache(q, *caches, **given, causal=True, **HERE)
        wanted = of_batch([x.double() for x in (q, *(x[:, :rows] for x in caches))], causal=True)
        alike([found], wanted[:1])
    row = torch.tensor([1, 1])
    found = door.flash_attn_with_kvcache(q, *caches, cache_batch_idx=row, **HERE)
    alike([found], of_batch([x.double() for x in (q, *(x[[1, 1]] for x in caches))])[:1])


def test_cache_that_begins_behind_padding() -> None:
    q, caches, used, pad = randn(B, 2, H, D).float(), cache_of(), [9, 12], [4, 0]
    found = two.flash_attn_with_kvcache(
        *(q, *caches),
        cache_seqlens=torch.tensor(used),
        cache_leftpad=torch.tensor(pad),
        causal=True,
        **HERE,
    )
    each = [
        truth(*(x.double() for x in (q[b], *(c[b, pad[b] : used[b]] for c in caches))), causal=True)
        for b in range(B)
    ]
    alike([found], [torch.stack([out for out, _ in each])])


@pytest.mark.parametrize("door", [two, three], ids=["two", "three"])
def test_pages_take_new_tokens(door) -> None:
    caches, used = [x.reshape(6, 4, H_KV, D) for x in cache_of()], [6, 3]
    kept = [x.clone() for x in caches]
    q, k, v = (randn(B, 1, n, D, seed=s).float() for s, n in ((3, H), (4, H_KV), (5, H_KV)))
    table = torch.tensor([[5, 1, 2], [0, 3, 4]])
    named = {"block_table" if door is two else "page_table": table}
    found = door.flash_attn_with_kvcache(
        *(q, *caches, k, v), cache_seqlens=torch.tensor(used), **named, causal=True, **HERE
    )
    for b, n in enumerate(used):
        old = (x[table[b]].flatten(0, 1)[:n] for x in kept)
        keys, values = (torch.cat(x).double() for x in zip(old, (k[b], v[b]), strict=True))
        alike([found[b]], truth(q[b].double(), keys, values)[:1])


def test_packed_queries_and_new_tokens_of_three() -> None:
    caches, used = cache_of(), [5, 2]
    kept, ends = [x.clone() for x in caches], torch.tensor([0, 1, 4], dtype=torch.int32)
    q, k, v = (randn(4, n, D, seed=s).float() for s, n in ((3, H), (4, H_KV), (5, H_KV)))
    found = three.flash_attn_with_kvcache(
        *(q, *caches, k, v),
        cache_seqlens=torch.tensor(used),
        cu_seqlens_q=ends,
        cu_seqlens_k_new=ends,
        causal=True,
        **HERE,
    )
    for b, (n, rows) in enumerate(zip(used, (slice(0, 1), slice(1, 4)), strict=True)):
        old = (x[b, :n] for x in kept)
        keys, values = (torch.cat(x).double() for x in zip(old, (k[rows], v[rows]), strict=True))
        alike([found[rows]], truth(q[rows].double(), keys, values, causal=True)[:1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ["dense", "packed", "packed queries", "packed keys"])
def test_queries_that_are_no_new_keys_turn_from_where_these_go(shape: str, causal: bool) -> None:
    """A packed side has three tokens of one sequence and one of the other, in turns; a dense one
    has two queries of each, or three keys."""
    caches, used = cache_of(), [5, 2]
    rows = [2, 2] if shape in ("dense", "packed keys") else [3, 1]
    new = [3, 3] if shape in ("dense", "packed queries") else [1, 3]
    kept = [x.clone() for x in caches]
    ends = [torch.tensor([0, n[0], sum(n)], dtype=torch.int32) for n in (rows, new)]
    q, k, v = (
        randn(sum(n), heads, D, seed=seed).float()
        for seed, n, heads in ((3, rows, H), (4, new, H_KV), (5, new, H_KV))
    )
    given: dict[str, Any] = {"causal": causal, "cache_seqlens": torch.tensor(used), **angles(D)}
    of_q, of_k = (shape in ("packed", f"packed {side}") for side in ("queries", "keys"))
    own = [
        x if whole else x.unflatten(0, (B, -1)) for x, whole in ((q, of_q), (k, of_k), (v, of_k))
    ]
    given |= {"cu_seqlens_q": ends[0]} if of_q else {}
    given |= {"cu_seqlens_k_new": ends[1]} if of_k else {}
    found = three.flash_attn_with_kvcache(own[0], *caches, *own[1:], **given, **HERE)
    wanted = []
    for b, n in enumerate(used):
        queries, keys, values = (
            x[slice(*of[b : b + 2])] for x, of in ((q, ends[0]), (k, ends[1]), (v, ends[1]))
        )
        places = torch.arange(n, n + rows[b]) if causal else torch.full((rows[b],), n)
        query = turned(queries, *angles(D).values(), places, True)
        key = turned(keys, *angles(D).values(), torch.arange(n, n + new[b]), True)
        whole = torch.cat([kept[0][b, :n].double(), key])
        alike([caches[0][b, : n + new[b]]], [whole])
        seen = torch.cat([kept[1][b, :n], values]).double()
        wanted.append(truth(query, whole, seen, causal=causal)[0])
    alike([found.flatten(0, -3)], [torch.cat(wanted)])


@pytest.mark.parametrize("first", ["k", "v", "apart"])
def test_second_product_reads_caches_where_they_lie(first: str, monkeypatch) -> None:
    whole, read = randn(B, 12, H_KV, D + D_V).float(), []
    k, v = whole.split([D, D_V], -1) if first != "v" else whole.split([D_V, D], -1)[::-1]
    if first == "apart":
        k, v = k.contiguous(), v.contiguous()
    own = flash.attend
    monkeypatch.setattr(flash, "attend", lambda x, *y: read.append(x[1]) or own(x, *y))
    q, qv = (randn(B, 2, H, n, seed=9).float() for n in (D, D_V))
    found = three.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=7, causal=True, **HERE)
    joined = [torch.cat([q, qv], -1), torch.cat([k, v], -1)[:, :7], v[:, :7]]
    alike([found], of_batch([x.double() for x in joined], causal=True)[:1])
    assert (read[0].data_ptr() == whole.data_ptr()) is (first != "apart")


Q, (K_CACHE, V_CACHE) = randn(B, 1, H, D).float(), cache_of()
NEW = {"k": K_CACHE[:, :1], "v": V_CACHE[:, :1]}
ROWS = {"cache_batch_idx": torch.tensor([1, 0])}
PAD = {"cache_leftpad": torch.tensor([1, 0])}
REFUSED = {
    "qv": (three, {"qv": Q[..., :3]}, "qv has v's columns"),
    "rotary lengths": (three, {"rotary_seqlens": torch.tensor([1, 2])}, "rotary_seqlens"),
    "no lengths": (two, NEW, "cache_seqlens"),
    "half": (two, {"k": NEW["k"], "cache_seqlens": 1}, "come together"),
    "nothing to turn": (two, angles(D), "rotary_cos"),
    "two tables": (two, {**ROWS, "block_table": torch.tensor([[0], [1]])}, "cache_batch_idx"),
    "padding of rows": (two, {**ROWS, **PAD}, "cache_leftpad"),
    "padding and packing": (
        three,
        {**NEW, **PAD, "cache_seqlens": 3, "q": Q[:, 0], "cu_seqlens_q": torch.arange(3)},
        "pass no cu_seqlens_q",
    ),
    "padding and angles": (two, {**NEW, **PAD, **angles(D), "cache_seqlens": 3}, "rotate q and k"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_why_before_anything_is_written(case: str) -> None:
    door, given, reason = REFUSED[case]
    caches = cache_of()
    with pytest.raises(SpecError, match=reason):
        door.flash_attn_with_kvcache(
            **{"q": Q, "k_cache": caches[0], "v_cache": caches[1], **given}
        )
    assert torch.equal(caches[0], K_CACHE) and torch.equal(caches[1], V_CACHE)


def test_angles_that_fit_no_key_are_refused_before_anything_is_written() -> None:
    caches = cache_of()
    kept = [x.clone() for x in caches]
    new = {"k": K_CACHE[:, :2], "v": V_CACHE[:, :2], "cache_seqlens": 3}
    with pytest.raises(SpecError, match="multiple of 16"):
        two.flash_attn_with_kvcache(Q, *caches, **new, **angles(D // 2), **HERE)
    assert all(torch.equal(one, other) for one, other in zip(caches, kept, strict=True))


def test_second_product_of_a_cache_of_8_bits_is_refused() -> None:
    cache = [x.to(torch.float8_e4m3fn) for x in (K_CACHE, V_CACHE)]
    q, qv = Q.bfloat16(), Q[..., : cache[1].shape[-1]].bfloat16()
    scales = {"k_descale": torch.full((B, H_KV), 2.0), "v_descale": torch.ones(B, H_KV)}
    with pytest.raises(SpecError, match="qv beside 8 bits"):
        three.flash_attn_with_kvcache(q, *cache, qv=qv, cache_seqlens=1, **scales)
