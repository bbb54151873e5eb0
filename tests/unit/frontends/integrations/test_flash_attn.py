"""The doors for flash-attention 2 and 3 compute what these document, and return what they do."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from attngen.integrations import flash_attn as two
from attngen.integrations import flash_attn_interface as three
from torch import Tensor

from attngen import SpecError
from attngen.frontends.integrations import flash

B, H, H_KV, S_Q, S_KV, D, D_V = 2, 4, 2, 5, 9, 16, 8
HERE: dict[str, Any] = {"backend": "reference"}
HALF: dict[str, Any] = {"causal": True, "softmax_scale": 0.2, "softcap": 3.0}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(s_q: int = S_Q, s_kv: int = S_KV, d_v: int = D) -> list[Tensor]:
    shapes = (B, s_q, H, D), (B, s_kv, H_KV, D), (B, s_kv, H_KV, d_v)
    return [randn(*shape, seed=n) for n, shape in enumerate(shapes)]


def truth(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Output [s, h, d] and LSE [h, s] of one sequence; diagonals end at the last key."""
    (s_q, heads, d), s_kv = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * given.get("softmax_scale", 1 / math.sqrt(d))
    if cap := given.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(s_q)[:, None] + s_kv - s_q
    distance = place - torch.arange(s_kv)
    if (slopes := given.get("alibi_slopes")) is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    left, right = given.get("window_size", (-1, -1))
    hidden = distance < 0 if given.get("causal") else torch.zeros_like(distance, dtype=torch.bool)
    hidden |= distance > left if left >= 0 else hidden
    hidden |= -distance > right if right >= 0 else hidden
    if chunk := given.get("attention_chunk"):
        hidden |= place.div(chunk, rounding_mode="floor") != torch.arange(s_kv) // chunk
    scores = scores.masked_fill(hidden, -math.inf)
    if (sink := given.get("s_aux")) is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(heads, s_q, 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., :s_kv]
    return torch.einsum("hij,jhd->ihd", weights, v), scores.logsumexp(-1)


def of_batch(operands: list[Tensor], **given: Any) -> tuple[Tensor, ...]:
    each = [truth(*x, **given) for x in zip(*operands, strict=True)]
    return tuple(torch.stack(x) for x in zip(*each, strict=True))


def alike(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal, scaled, capped": HALF,
    "a window": {"window_size": (3, 1)},
    "a causal window": {"causal": True, "window_size": (2, 0)},
}


@pytest.mark.parametrize("door", [two, three], ids=["two", "three"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_function_returns_output_and_lse(door, variant: str) -> None:
    given, operands = VARIANTS[variant], dense(d_v=D_V)
    out, lse, *rest = door.flash_attn_func(*operands, **given, return_attn_probs=True, **HERE)
    alike((out, lse), of_batch(operands, **given))
    assert rest == ([None] if door is two else [])
    assert torch.equal(door.flash_attn_func(*operands, **given, **HERE), out)


def test_alibi_is_that_of_two() -> None:
    given = {"alibi_slopes": torch.rand(H), "causal": True, "deterministic": True}
    alike([two.flash_attn_func(*dense(), **given, **HERE)], of_batch(dense(), **given)[:1])


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_and_sinks_are_those_of_three(causal: bool) -> None:
    given = {"attention_chunk": 3, "s_aux": randn(H, seed=5).float(), "causal": causal}
    found = three.flash_attn_func(*dense(), **given, return_attn_probs=True, **HERE)
    alike(found, of_batch(dense(), **given))


def test_a_row_that_sees_no_key_is_zero() -> None:
    operands = dense(s_q=4, s_kv=2)
    out, lse, _ = two.flash_attn_func(*operands, causal=True, return_attn_probs=True, **HERE)
    assert not out[:, :2].any() and (lse[..., :2] == -math.inf).all()
    alike((out, lse), of_batch(operands, causal=True))


def test_dropout_keeps_a_share() -> None:
    operands = [torch.ones(1, 64, 2, 16) for _ in range(3)]
    out, lse, drawn = two.flash_attn_func(*operands, 0.25, return_attn_probs=True, **HERE)
    assert 0.9 < out.mean() < 1.1 and out.std() > 0 and lse.shape == (1, 2, 64) and drawn is None


@pytest.mark.parametrize("heads", ["qkv of two", "kv of two", "qkv of three", "groups of three"])
def test_packed_tensors_have_packed_gradients(heads: str) -> None:
    shapes = {
        "qkv of two": (two.flash_attn_qkvpacked_func, (B, 6, 3, H, D), {}),
        "kv of two": (two.flash_attn_kvpacked_func, (B, 6, 2, H_KV, D), {}),
        "qkv of three": (three.flash_attn_qkvpacked_func, (B, 6, 3, H, D), {}),
        "groups of three": (
            three.flash_attn_qkvpacked_func,
            (B, 6, H + 2 * H_KV, D),
            {"num_heads_q": H},
        ),
    }
    function, shape, given = shapes[heads]
    packed = [randn(*shape).requires_grad_() for _ in "ab"]
    q = [randn(B, 6, H, D, seed=1).requires_grad_() for _ in "ab"] if "kv of" in heads else []
    q = [] if "qkv" in heads else q
    one, other = packed
    found = function(*q[:1], one, **HALF, **given, **HERE)
    parts = other.unbind(2) if len(shape) == 5 else other.split([H, H_KV, H_KV], 2)
    wanted, _ = of_batch([*q[1:], *parts], **HALF)
    alike([found], [wanted])
    for out in (found, wanted):
        out.backward(randn(*out.shape, seed=8))
    alike([one.grad], [other.grad])


ENDS = torch.tensor([0, 4, 10]), torch.tensor([0, 9, 14])


def of_tokens(operands: list[Tensor], ends: Any = ENDS, **given: Any) -> tuple[Tensor, ...]:
    q, k, v = operands
    rows, keys = (each.tolist() for each in ends)
    each = [
        truth(q[a:b], k[c:d], v[c:d], **given)
        for a, b, c, d in zip(rows, rows[1:], keys, keys[1:], strict=False)
    ]
    outs, lses = zip(*each, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("door", [two, three], ids=["two", "three"])
def test_packed_tokens_and_their_gradients(door) -> None:
    shapes = (10, H, D), (14, H_KV, D), (14, H_KV, D)
    own, other = ([randn(*x, seed=n).requires_grad_() for n, x in enumerate(shapes)] for _ in "ab")
    given = {"return_attn_probs": True, **HALF}
    out, lse, *_ = door.flash_attn_varlen_func(*own, *ENDS, 6, 9, **given, **HERE)
    wanted, lses = of_tokens(other, **HALF)
    alike((out, lse), (wanted, lses))
    for each in (out, wanted):
        each.backward(randn(*out.shape, seed=8))
    alike([x.grad for x in own], [x.grad for x in other])


def test_packed_tokens_of_packed_tensors() -> None:
    q, kv = randn(10, H, D), randn(14, 2, H_KV, D)
    found = two.flash_attn_varlen_kvpacked_func(q, kv, *ENDS, 6, 9, **HALF, **HERE)
    alike([found], of_tokens([q, *kv.unbind(1)], **HALF)[:1])
    qkv, (ends, _) = randn(10, 3, H, D), ENDS
    found = two.flash_attn_varlen_qkvpacked_func(qkv, ends, 6, **HALF, **HERE)
    alike([found], of_tokens([*qkv.unbind(1)], (ends, ends), **HALF)[:1])


def test_tokens_in_use_of_three() -> None:
    q, k, v = randn(10, H, D), randn(14, H_KV, D), randn(14, H_KV, D, seed=2)
    used = {"seqused_q": torch.tensor([3, 6]), "seqused_k": torch.tensor([7, 2])}
    found = three.flash_attn_varlen_func(q, k, v, *ENDS, 6, 9, **used, causal=True, **HERE)
    first, _ = truth(q[:3], k[:7], v[:7], causal=True)
    second, _ = truth(q[4:], k[9:11], v[9:11], causal=True)
    alike([found], [torch.cat([first, q.new_zeros(1, H, D), second])])


def test_pages_of_packed_queries() -> None:
    q, k, v = randn(10, H, D), randn(16, H_KV, D), randn(16, H_KV, D, seed=2)
    table, ends = torch.tensor([[2, 0], [3, 1]]), torch.tensor([0, 7, 12])
    pages = [torch.stack([x[4:8], x[12:], x[:4], x[8:12]]) for x in (k, v)]
    given = {"block_table": table, "causal": True}
    found = two.flash_attn_varlen_func(q, *pages, ENDS[0], ends, 6, 7, **given, **HERE)
    whole = [torch.cat([x[:7], x[8:13]]) for x in (k, v)]
    alike([found], of_tokens([q, *whole], (ENDS[0], ends), causal=True)[:1])


# ---- caches


def cache_of(rows: int = 12) -> list[Tensor]:
    return [randn(B, rows, H_KV, D, seed=n).float() for n in (1, 2)]


def angles(width: int) -> dict[str, Tensor]:
    turn = torch.arange(12)[:, None] * 10.0 ** -torch.arange(width // 2)
    return {"rotary_cos": turn.cos(), "rotary_sin": turn.sin()}


def turned(x: Tensor, cosines: Tensor, sines: Tensor, places: Any, interleaved: bool) -> Tensor:
    """Columns of x [s, h, d] rotated, a pair's in each other's neighbourhood or half of w apart."""
    cosine, sine = (each[places][:, None].double() for each in (cosines, sines))
    half, out = cosine.shape[-1], x.double().clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].double(), x[..., second].double()
    out[..., first], out[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return out


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


def test_second_product_of_scores_is_of_values() -> None:
    """Dense and packed with gradients, and of caches that lie as MLA's do, which are not copied."""
    operands = [x.requires_grad_() for x in (*dense(d_v=D_V), randn(B, S_Q, H, D_V, seed=7))]
    q, k, v, qv = operands
    wanted = of_batch([torch.cat([q, qv], -1), torch.cat([k, v], -1), v], causal=True)
    d_out = randn(*wanted[0].shape, seed=8)
    true = torch.autograd.grad(wanted[0], operands, d_out)
    ends_q, ends_k = (torch.arange(B + 1) * n for n in (S_Q, S_KV))
    for flat in (False, True):
        given = [x.flatten(0, 1) if flat else x for x in operands]
        lengths = (ends_q, ends_k, S_Q, S_KV) if flat else ()
        attend = three.flash_attn_varlen_func if flat else three.flash_attn_func
        out = attend(*given[:3], *lengths, qv=given[3], causal=True, **HERE)
        alike([out.view_as(d_out)], wanted[:1])
        alike(torch.autograd.grad(out, operands, d_out.view_as(out)), true)


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
    "padding and angles": (two, {**NEW, **PAD, **angles(D), "cache_seqlens": 3}, "rotate q and k"),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_why(case: str) -> None:
    door, given, reason = REFUSED[case]
    with pytest.raises(SpecError, match=reason):
        door.flash_attn_with_kvcache(Q, K_CACHE, V_CACHE, **given)


def test_second_product_of_a_cache_of_8_bits_is_refused() -> None:
    cache = [x.to(torch.float8_e4m3fn) for x in (K_CACHE, V_CACHE)]
    q, qv = Q.bfloat16(), Q[..., : cache[1].shape[-1]].bfloat16()
    scales = {"k_descale": torch.full((B, H_KV), 2.0), "v_descale": torch.ones(B, H_KV)}
    with pytest.raises(SpecError, match="qv beside 8 bits"):
        three.flash_attn_with_kvcache(q, *cache, qv=qv, cache_seqlens=1, **scales)


def test_heads_of_a_packed_tensor_must_be_said() -> None:
    with pytest.raises(SpecError, match="num_heads_q"):
        three.flash_attn_qkvpacked_func(randn(B, 6, 8, D))


def test_every_function_is_named_and_takes_a_backend() -> None:
    assert len(two.__all__) == 7 and len(three.__all__) == 4
    for door in (two, three):
        for name in door.__all__:
            assert [*inspect.signature(getattr(door, name)).parameters][-1] == "backend"
