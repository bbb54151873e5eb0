"""torch.library.opcheck of both operations over a covering set of calls: layouts, lengths, pages,
splits, what scores are made of, gradients."""

from __future__ import annotations

import pytest
import torch

from attngen import AttentionSpec
from attngen.frontends.pytorch import forward  # noqa: F401  # registers the operations

from . import oracle

pytestmark = pytest.mark.gpu
D = 64
KERNELS = [
    AttentionSpec(head_dim=D, mask="causal", window=True),
    AttentionSpec(head_dim=D, decode=True),
    AttentionSpec(head_dim=D, layout="paged_kv_bshd_bshd_bshd", decode=True),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=oracle.DEVICE)


def randn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return oracle.randn(*shape, dtype=dtype, seed=sum(shape))


def dense(s_q=70, s_kv=90, heads=(4, 2), layout="bshd"):
    return oracle.operands(2, *heads, s_q, s_kv, D, layout=layout)


def packed(*shape: int):
    return randn(*shape, D), None, None


ENDS = (0, 3, 40, 40)
TABLE = ((4, 1), (0, 0), (3, 2))
CALLS = {
    "dense": (lambda: dense(), lambda: {"mask": "causal", "window_left": 9}),
    "few queries": (lambda: dense(1), lambda: {}),
    "few queries in splits": (lambda: dense(3), lambda: {"num_splits": 2}),
    "one tensor in splits": (
        lambda: packed(2, 40, 3, 2), lambda: {"layout": "bs3hd", "num_splits": 2},
    ),
    "keys and values in splits": (
        lambda: (randn(2, 3, 4, D), randn(2, 70, 2, 2, D), None),
        lambda: {"layout": "bshd_bs2hd", "num_splits": 3},
    ),
    "scores": (
        lambda: dense(),
        lambda: {
            "softcap": 5.0, "softmax": "learnable", "sink": randn(4, dtype=torch.float32),
            "alibi_slopes": randn(4, dtype=torch.float32).abs(), "max_logit": True,
        },
    ),
    "bias": (lambda: dense(64, 64), lambda: {"bias": randn(4, 64, 64), "bias_type": "pre_scale"}),
    "attn_mask": (
        lambda: dense(),
        lambda: {"attn_mask": randn(2, 1, 70, 90) > 0, "mask": "arbitrary"},
    ),
    "used": (lambda: dense(), lambda: {"mask": "padding", "seqused_kv": ints(5, 90)}),
    "tokens": (
        lambda: (randn(40, 4, D), randn(40, 2, D), randn(40, 2, D)),
        lambda: {"layout": "thd", "cu_seqlens_q": ints(*ENDS), "cu_seqlens_kv": ints(*ENDS)},
    ),
    "tokens in one split": (
        lambda: (randn(40, 4, D), randn(40, 2, D), randn(40, 2, D)),
        lambda: {
            "layout": "thd", "cu_seqlens_q": ints(*ENDS), "cu_seqlens_kv": ints(*ENDS),
            "num_splits": 1,
        },
    ),
    "tokens in one tensor and one split": (
        lambda: packed(40, 3, 2),
        lambda: {
            "layout": "t3hd", "cu_seqlens_q": ints(*ENDS), "cu_seqlens_kv": ints(*ENDS),
            "num_splits": 1,
        },
    ),
    "pages in splits": (
        lambda: (randn(3, 2, 4, D), randn(5, 16, 2, D), randn(5, 16, 2, D)),
        lambda: {
            "layout": "paged_kv_bshd_bshd_bshd", "seqused_kv": ints(20, 3, 32), "num_splits": 2,
            "page_table_k": ints(*sum(TABLE, ())).view(3, 2),
            "page_table_v": ints(*sum(TABLE, ())).view(3, 2),
        },
    ),
    "tokens over pages in splits": (
        lambda: (randn(6, 4, D), randn(5, 16, 2, D), randn(5, 16, 2, D)),
        lambda: {
            "layout": "paged_kv_thd_bshd_bshd", "seqused_kv": ints(20, 3, 32), "num_splits": 2,
            "cu_seqlens_q": ints(0, 1, 4, 6),
            "page_table_k": ints(*sum(TABLE, ())).view(3, 2),
            "page_table_v": ints(*sum(TABLE, ())).view(3, 2),
        },
    ),
}  # fmt: skip
INFERENCE = [name for name in CALLS if "pages" in name]


@pytest.mark.parametrize("name", CALLS)
def test_forward_passes_opcheck(name):
    operands, arguments = (make() for make in CALLS[name])
    torch.library.opcheck(torch.ops.attngen.forward, operands, arguments)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in INFERENCE])
def test_forward_with_gradients_passes_opcheck(name):
    operands, arguments = (make() for make in CALLS[name])
    leaves = tuple(None if x is None else x.requires_grad_() for x in operands)
    if name == "bias":
        arguments["bias"].requires_grad_()
    torch.library.opcheck(torch.ops.attngen.forward, leaves, arguments)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in INFERENCE])
def test_backward_passes_opcheck(name):
    operands, arguments = (make() for make in CALLS[name])
    out, lse, *_ = torch.ops.attngen.forward(*operands, **arguments)
    torch.library.opcheck(
        torch.ops.attngen.backward, (out.sin(), None, *operands, out, lse), arguments
    )
