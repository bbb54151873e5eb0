"""Inconsistent calls are refused, all violations at once, in words that say what to do."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from attngen.errors import SpecError
from attngen.reference import AttentionCall, attention, check

B, S, H, D = 2, 6, 4, 8


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


X = tensor(B, S, H, D)
KV = tensor(B, S, 2, D)
TOKENS = tensor(12, H, D)
CU = int32(0, 6, 12)
PAGES = tensor(4, 3, H, D)
TABLE = int32(0, 1, 2, 3).view(2, 2)
THD = {"q": TOKENS, "k": TOKENS, "v": TOKENS, "layout": "thd"}
PAGED = {"k": PAGES, "v": PAGES, "layout": "paged_kv_bshd_bshd_bshd"}

# What is asked (beside q = k = v = X), and words that the refusal must contain.
REFUSED = {
    "layout_unknown": ({"layout": "shbd"}, ["'shbd'", "bshd_bshd_bshd"]),
    "dtype_integer": ({"q": X.int(), "k": X.int(), "v": X.int()}, ["one dtype", "int32"]),
    "dtype_mixed": ({"k": X.half()}, ["one dtype", "float16"]),
    "head_dim_differs": ({"k": tensor(B, S, H, 7)}, ["same head dim", "8 and 7"]),
    "heads_do_not_divide": ({"k": tensor(B, S, 3, D), "v": tensor(B, S, 3, D)}, ["divisor"]),
    "heads_of_kv_differ": ({"k": KV}, ["4 in q, 2 in k, 4 in v"]),
    "lengths_of_kv_differ": ({"v": tensor(B, 5, H, D)}, ["equal lengths", "[2, 5] in v"]),
    "batch_differs": (
        {"k": tensor(3, S, H, D), "v": tensor(3, S, H, D)},
        ["batch of q, 2 sequences"],
    ),
    "mask_unknown": ({"mask": "casual"}, ["'casual'", "causal_bottom_right"]),
    "mask_arbitrary_alone": ({"mask": "arbitrary"}, ["needs attn_mask"]),
    "mask_padding_alone": ({"mask": "padding_causal"}, ["needs the lengths", "seqused_kv"]),
    "mask_padding_with_q_only": ({"mask": "padding", "seqused_q": int32(1, 2)}, ["seqused_kv"]),
    "alignment_contradicts": (
        {"mask": "causal_bottom_right", "bottom_right": False},
        ["bottom_right=False", "'causal'"],
    ),
    "window_negative": ({"window": (-2, 0)}, ["(-2, 0)"]),
    "window_one_number": ({"window": 128}, ["got 128", "(127, 0)"]),
    "attn_mask_float": ({"attn_mask": tensor(S, S)}, ["needs bool", "as bias"]),
    "attn_mask_shape": ({"attn_mask": tensor(3, 1, S, S, dtype=torch.bool)}, ["broadcast of"]),
    "block_mask_heads": (
        {"block_mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 3, S, S, "cpu")},
        ["block_mask", "[1, 3,"],
    ),
    "block_mask_elsewhere": (
        {"block_mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, S, S, "cpu").to("meta")},
        ["block_mask needs q's device"],
    ),
    "block_mask_short": (
        {"block_mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, S, 4, "cpu")},
        ["block_mask needs at least [6, 6]"],
    ),
    "softmax_unknown": ({"softmax": "softmax1"}, ["'softmax1'", "off_by_one"]),
    "sink_missing": ({"softmax": "learnable"}, ["sink float32 [h_q=4]", "None"]),
    "sink_shape": ({"softmax": "learnable", "sink": tensor(1)}, ["[h_q=4]; got float32 [1]"]),
    "sink_dtype": (
        {"softmax": "learnable", "sink": tensor(H, dtype=torch.int32)},
        ["got int32 [4]"],
    ),
    "sink_off_by_one": ({"softmax": "off_by_one", "sink": tensor(H)}, ["takes no sink"]),
    "sink_vanilla": ({"sink": tensor(H)}, ["'vanilla' takes no sink"]),
    "softcap_negative": ({"softcap": -1.0}, ["softcap", "-1.0"]),
    "softcap_nan": ({"softcap": float("nan")}, ["softcap", "nan"]),
    "bias_type_unknown": ({"bias_type": "post"}, ["'post'", "post_scale"]),
    "bias_with_type_alibi": ({"bias": tensor(S, S), "bias_type": "alibi"}, ["alibi_slopes=True"]),
    "bias_dtype": ({"bias": tensor(S, S).int()}, ["q's dtype, float32", "int32 [6, 6]", "Cast"]),
    "bias_of_bools": ({"bias": tensor(S, S).bool()}, ["bool [6, 6]", "as attn_mask"]),
    "bias_shape": ({"bias": tensor(1, 1, S, 5)}, ["bias needs a broadcast"]),
    "bias_five_axes": ({"bias": tensor(1, 1, 1, S, S)}, ["bias needs a broadcast"]),
    "alibi_contradicts": ({"bias_type": "alibi", "alibi_slopes": False}, ["contradicts"]),
    "alibi_shape": ({"alibi_slopes": tensor(3)}, ["[h_q=4] or [b=2, h_q=4]"]),
    "alibi_dtype": ({"alibi_slopes": tensor(H).int()}, ["float32", "int32 [4]"]),
    "dropout_above_one": ({"dropout_p": 1.5}, ["0..1", "1.5"]),
    "dropout_nan": ({"dropout_p": float("nan")}, ["0..1"]),
    "rng_state_dtype": ({"rng_state": int32(1, 2)}, ["int64 [2]", "int32 [2]"]),
    "rng_state_shape": ({"rng_state": torch.tensor([1])}, ["int64 [2]"]),
    "device_differs": ({"seqused_kv": int32(1, 2).to("meta")}, ["seqused_kv needs q's device"]),
    "thd_without_cu_seqlens": (THD, ["needs cu_seqlens_q"]),
    "thd_without_cu_seqlens_kv": (THD | {"cu_seqlens_q": CU}, ["needs cu_seqlens_kv"]),
    "thd_with_seqused": (
        THD | {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "seqused_kv": int32(6, 6)},
        ["seqused_kv too"],
    ),
    "thd_empty_cu_seqlens": (THD | {"cu_seqlens_q": int32(), "cu_seqlens_kv": CU}, ["[b+1]"]),
    "cu_seqlens_dtype": ({"cu_seqlens_kv": CU.short()}, ["needs int32", "int16 [3]", "Cast it"]),
    "cu_seqlens_count": ({"cu_seqlens_kv": int32(0, 6)}, ["int32 [b+1] with b=2"]),
    "seqused_count": ({"seqused_q": int32(1, 2, 3)}, ["seqused_q needs int32 [b]"]),
    "padded_offsets_dense": (
        {"cu_seqlens_q": CU, "cu_seqlens_q_padded": CU},
        ["belongs to thd", "bshd"],
    ),
    "lengths_said_twice": ({"seqused_q": int32(1, 2), "cu_seqlens_q": CU}, ["Pass one"]),
    "seqused_too_long": ({"seqused_kv": int32(2, 7)}, ["room for 6", "seqused_kv[1]=7", "0..6"]),
    "seqused_negative": ({"seqused_q": int32(-1, 2)}, ["seqused_q[0]=-1", "0..6"]),
    "max_seqlen_too_small": ({"max_seqlen_q": 5}, ["max_seqlen_q=5", "at least 6"]),
    "cu_seqlens_beyond_tokens": (
        THD | {"cu_seqlens_q": int32(0, 6, 13), "cu_seqlens_kv": CU},
        ["cu_seqlens_q[2]=13", "12 tokens", "6..12"],
    ),
    "cu_seqlens_decreasing": (
        THD | {"cu_seqlens_q": CU, "cu_seqlens_kv": int32(0, 6, 5)},
        ["cu_seqlens_kv[2]=5", "6..12"],
    ),
    "padded_offsets_overlap": (
        THD | {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "cu_seqlens_q_padded": int32(0, 5, 12)},
        ["cu_seqlens_q_padded[1]=5", "a sequence of 6", "6..6"],
    ),
    "packed_lengths_differ": (
        {
            "q": tensor(B, S, 3, H, D),
            "k": None,
            "v": None,
            "layout": "bs3hd",
            "seqused_q": int32(1, 2),
            "seqused_kv": int32(2, 2),
        },
        ["one length"],
    ),
    "bias_shorter_than_thd": (
        THD | {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "bias": tensor(1, 1, 5, 6)},
        ["bias needs at least [6, 6]"],
    ),
    "bias_shorter_than_max_seqlen": (
        THD
        | {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "max_seqlen_kv": 9, "bias": tensor(1, 1, 6, 8)},
        ["bias needs a broadcast"],
    ),
    "page_table_elsewhere": ({"page_table": TABLE}, ["paged layouts"]),
    "paged_without_table": (PAGED | {"seqused_kv": int32(6, 6)}, ["needs page_table"]),
    "paged_without_lengths": (PAGED | {"page_table": TABLE}, ["seqused_kv int32 [b]"]),
    "paged_table_dtype": (
        PAGED | {"seqused_kv": int32(6, 6), "page_table": TABLE.short()},
        ["page_table int32"],
    ),
    "paged_with_gradient": (
        PAGED | {"seqused_kv": int32(6, 6), "page_table": TABLE, "q": X.clone().requires_grad_()},
        ["inference only", "no_grad"],
    ),
    "paged_dropout_without_state": (
        PAGED | {"seqused_kv": int32(6, 6), "page_table": TABLE, "dropout_p": 0.1},
        ["explicit rng_state"],
    ),
    "paged_length_beyond_table": (
        PAGED | {"seqused_kv": int32(6, 7), "page_table": TABLE},
        ["room for 6", "seqused_kv[1]=7"],
    ),
    "paged_no_such_page": (
        PAGED | {"seqused_kv": int32(6, 6), "page_table": TABLE + 1},
        ["page_table[1, 1]=4", "0..3"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_call_inconsistent_is_refused_with_reason(case):
    asked, words = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        attention(**({"q": X, "k": X, "v": X} | asked))
    reason = str(caught.value)
    assert all(word in reason for word in words), reason


def test_call_several_violations_are_reported_together():
    with pytest.raises(SpecError) as caught:
        attention(X, X, X.half(), mask="m", softmax="s", bias_type="b", dropout_p=-1, softcap=-1.0)
    assert len(caught.value.reasons) == 6


ACCEPTED = {
    "gqa": {"k": KV, "v": KV},
    "own_head_dim_v": {"v": tensor(B, S, H, 3)},
    "bottom_right_by_flag": {"mask": "causal", "bottom_right": True},
    "attn_mask_beside_causal": {"mask": "causal", "attn_mask": tensor(S, S, dtype=torch.bool)},
    "alibi_beside_bias": {"alibi_slopes": True, "bias": tensor(1, 1, S, S)},
    "sink_float64_beside_float64": {
        "q": X.double(),
        "k": X.double(),
        "v": X.double(),
        "softmax": "learnable",
        "sink": tensor(H).double(),
    },
    "max_seqlen_generous": {"max_seqlen_q": 100, "max_seqlen_kv": 6},
    "bias_longer_than_thd": THD
    | {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "bias": tensor(1, 1, 8, 9)},
    "packed_lengths_from_kv": {
        "q": tensor(B, S, 3, H, D),
        "k": None,
        "v": None,
        "layout": "bs3hd",
        "mask": "padding",
        "cu_seqlens_kv": int32(0, 2, 8),
    },
    "paged_page_sizes_differ": PAGED
    | {
        "v": tensor(8, 2, H, D),
        "page_table": (TABLE, int32(*range(6)).view(2, 3)),
        "seqused_kv": int32(5, 6),
    },
    "paged_gradient_switched_on_but_unused": PAGED
    | {"page_table": TABLE, "seqused_kv": int32(5, 6)},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_call_legal_is_accepted(case):
    out, _ = attention(**({"q": X, "k": X, "v": X} | ACCEPTED[case]))
    assert out.isfinite().all()


def test_paged_under_no_grad_accepts_parameters():
    with torch.no_grad():
        attention(X.clone().requires_grad_(), **PAGED, page_table=TABLE, seqused_kv=int32(6, 6))


def test_check_meta_tensors_are_never_read():
    q = torch.empty(12, H, D, device="meta")
    cu = CU.to("meta")
    call = AttentionCall(
        q=q,
        k=q,
        v=q,
        layout="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        dropout_p=0.1,
        softmax="learnable",
        sink=torch.empty(H, device="meta"),
        mask="padding_causal",
        bias=torch.empty(2, 1, 6, 6, device="meta"),
    )
    operands = check(call)
    assert (operands.batch, operands.h_q, operands.h_kv) == (2, H, H)
