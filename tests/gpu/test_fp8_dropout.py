"""Dropout of FP8 calls: the mask bit for bit in both directions, and outputs against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec
from attngen.call.dropout import keep_scale
from attngen.call.numbers import Arguments
from attngen.call.table import OPTIONAL
from attngen.frontends.pytorch.fp8_backward import SCALES
from attngen.reference import dropout_keep_mask

from . import oracle, oracle_fp8, varlen
from .cases_fp8 import Fp8Case
from .oracle_fp8 import DTYPES
from .test_dropout import rng_state

pytestmark = pytest.mark.gpu
E4M3 = DTYPES["e4m3"]
CASES = [
    (Fp8Case(128, 128, mask="causal", heads=(2, 4, 2), lengths=(200, 333)), 0.1),
    (Fp8Case(128, 112, heads=(1, 2, 2), lengths=(333, 200), out_dtype="e4m3", scaled=True), 0.5),
    (Fp8Case(64, 64, mask="causal", window=(70, 0), heads=(1, 6, 2), lengths=(190, 310)), 0.9),
    (Fp8Case(48, 80, kv_dtype="e5m2", heads=(2, 3, 3), lengths=(129, 65), layout="sbhd"), 0.25),
    (Fp8Case(256, 256, mask="causal", heads=(1, 2, 1), lengths=(130, 170)), 0.2),
    (Fp8Case(128, 128, heads=(1, 2, 1), lengths=(70, 40)), 1.0),
]
IDS = [f"d{case.d}x{case.d_v}-{case.mask}-p{p}" for case, p in CASES]
KERNELS = [
    *(dataclasses.replace(case.spec, dropout=True) for case, _ in CASES),
    AttentionSpec(head_dim=64, dtype="e4m3", layout="thd", dropout=True),
    AttentionSpec(head_dim=128, dtype="e4m3", dropout=True, directions=("bwd",)),
]


@pytest.mark.parametrize(("case", "p"), CASES, ids=IDS)
def test_fp8_forward_with_dropout_is_right(case, p):
    arguments = {**case.arguments, "dropout_p": p, "rng_state": rng_state()}
    oracle_fp8.check_call(*case.operands(), **arguments)


def one_hot(*rows: int, heads: int, d: int) -> Tensor:
    """Row i of each of `rows` has its 1 in column i, float8_e4m3fn [sum of rows, heads, d]."""
    unit = torch.cat([torch.eye(n, d, device=oracle.DEVICE) for n in rows])
    return unit[:, None].expand(-1, heads, d).to(E4M3).contiguous()


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device=oracle.DEVICE).to(E4M3)


@pytest.mark.parametrize(("d", "p"), [(64, 0.1), (128, 0.75), (256, 0.5)])
def test_fp8_mask_of_the_forward_is_the_reference_s_bit_for_bit(d, p):
    """Scores of 0 and one-hot values: the output is the mask, and what is kept is all the same."""
    batch, heads, s_q = 2, 3, 140
    values = one_hot(d, heads=heads, d=d).expand(batch, -1, -1, -1).contiguous()
    out, aux = attngen.attention(
        *(zeros(batch, s_q, heads, d), zeros(batch, d, heads, d), values),
        dropout_p=p, rng_state=rng_state(), backend="cuda", return_lse=True,
    )  # fmt: skip
    mask = dropout_keep_mask(rng_state(), p, batch, heads, s_q, d).permute(0, 2, 1, 3)
    assert torch.equal(out > 0, mask)
    kept = torch.full_like(out[mask].float(), keep_scale(p) / d)
    torch.testing.assert_close(out[mask].float(), kept, rtol=2**-8, atol=0)
    torch.testing.assert_close(aux.lse, torch.full_like(aux.lse, d).log())


def test_fp8_mask_of_packed_sequences_is_of_their_own_positions():
    """The mask of a sequence follows from its number and from positions inside it."""
    q_lens, kv_lens, heads, d, p = (70, 0, 33), (64, 5, 40), 2, 64, 0.5
    out = attngen.attention(
        zeros(sum(q_lens), heads, d), zeros(sum(kv_lens), heads, d),
        one_hot(*kv_lens, heads=heads, d=d), layout="thd", dropout_p=p, rng_state=rng_state(),
        cu_seqlens_q=varlen.int32((0, 70, 70, 103)), cu_seqlens_kv=varlen.int32((0, 64, 69, 109)),
        backend="cuda",
    )  # fmt: skip
    mask = dropout_keep_mask(rng_state(), p, len(q_lens), heads, max(q_lens), d).transpose(1, 2)
    for b, rows in ((0, slice(0, 70)), (2, slice(70, 103))):
        seen = mask[b, : q_lens[b]].clone()
        seen[..., kv_lens[b] :] = False
        assert torch.equal(out[rows] > 0, seen), b


def test_fp8_mask_of_the_backward_is_the_forward_s():
    """Scores of 0 and one-hot gradients of outputs: dV is the mask, transposed."""
    batch, heads, s_q, s_kv, d, p = 2, 3, 128, 200, 128, 0.6
    d_o = one_hot(s_q, heads=heads, d=d).expand(batch, -1, -1, -1).contiguous()
    q, keys = zeros(batch, s_q, heads, d), zeros(batch, s_kv, heads, d)
    o = torch.zeros(batch, s_q, heads, d, device=q.device, dtype=torch.bfloat16)
    lse = torch.full((batch, heads, s_q), float(s_kv), device=q.device).log()
    one = torch.ones(1, device=q.device)
    operands = [rng_state() if name == "rng_state" else None for name in OPTIONAL]
    scales = [one if name in ("scale_dp", "descale_dp") else None for name in SCALES]
    _, _, dv, *_ = torch.ops.attngen.fp8_backward(
        *(d_o, None, q, keys, keys, o, lse, *operands, *Arguments(dropout_p=p), *scales)
    )
    mask = dropout_keep_mask(rng_state(), p, batch, heads, s_q, s_kv).permute(0, 3, 1, 2)
    assert torch.equal(dv > 0, mask)
    kept = torch.full_like(dv[mask].float(), keep_scale(p) / s_kv)
    torch.testing.assert_close(dv[mask].float(), kept, rtol=2**-4, atol=0)
