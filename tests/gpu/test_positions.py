"""Parts of longer sequences: the diagonal, ALiBi and dropout follow the places of the whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import attngen
from attngen import AttentionSpec
from attngen.reference import dropout_keep_mask

from . import gradients, oracle

pytestmark = pytest.mark.gpu
STATE = (0x123456789ABCDEF, 2**40 + 5)


class Case(NamedTuple):
    """A part of sequences: head dims, heads of queries and keys, lengths, its positions, and what
    else the call says."""

    dims: tuple[int, int]
    heads: tuple[int, int]
    lengths: tuple[int, int]
    positions: tuple[int, ...]
    more: dict[str, Any]

    def __str__(self) -> str:
        words = [f"d{self.dims[0]}x{self.dims[1]}", *(f"{k}-{v}" for k, v in self.more.items())]
        return "-".join([*words, "at", *map(str, self.positions)]).replace(" ", "")


CASES = [
    Case((64, 64), (4, 2), (70, 100), (128, 64), {"mask": "causal", "dropout_p": 0.1}),
    Case((128, 128), (2, 1), (130, 90), (77, 33), {"window": (40, 9), "dropout_p": 0.3}),
    Case((128, 128), (2, 2), (100, 140), (60, 0, 30, 3, 1), {"mask": "causal", "dropout_p": 0.1}),
    Case((192, 128), (2, 1), (90, 70), (21, 40), {"mask": "causal", "dropout_p": 0.2}),
    Case((128, 128), (2, 1), (100, 140), (500, 300), {"alibi_slopes": True}),
    Case((64, 64), (2, 1), (70, 90), (0, 500), {"mask": "causal"}),
    Case((256, 256), (1, 1), (70, 90), (500, 1), {"mask": "causal", "alibi_slopes": True}),
    Case((128, 128), (2, 1), (80, 90), (30, 30), {"window": (70, 0), "deterministic": True}),
]
KERNELS = [
    AttentionSpec(
        head_dim=case.dims[0],
        head_dim_v=case.dims[1],
        mask=case.more.get("mask", "none"),
        window="window" in case.more,
        alibi="alibi_slopes" in case.more,
        positions=True,
        dropout="dropout_p" in case.more,
        directions=("fwd", "bwd"),
        deterministic="deterministic" in case.more,
    )  # fmt: skip
    for case in CASES
]


def given(case: Case) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and the keyword arguments of a case."""
    tensors = oracle.operands(1, *case.heads, *case.lengths, *case.dims, torch.bfloat16)
    arguments = {"positions": case.positions, **case.more}
    if "dropout_p" in case.more:
        arguments["rng_state"] = torch.tensor(STATE, device=oracle.DEVICE)
    return [*tensors], arguments


@pytest.mark.parametrize("case", CASES, ids=str)
def test_part_is_right_with_its_gradients(case):
    tensors, arguments = given(case)
    tensors = [x.requires_grad_() for x in tensors]
    out, aux = attngen.attention(*tensors, **arguments, backend="cuda", return_lse=True)
    arguments.pop("deterministic", None)
    oracle.check(out, aux.lse, oracle.truth(*(x.detach() for x in tensors), **arguments))
    d_o = oracle.randn(*out.shape, dtype=out.dtype, seed=100)
    found = torch.autograd.grad([out], tensors, [d_o])
    gradients.check(found, [*tensors, d_o], None, **arguments)


@pytest.mark.parametrize("positions", [(0, 0), (96, 32), (37, 13, 0, 2, 1)], ids=str)
def test_mask_of_a_part_is_the_whole_s_bit_for_bit(positions):
    """Scores of 0 and one-hot values: the output is the mask."""
    d, s_q, heads = 64, 70, 2
    q = torch.zeros(1, s_q, heads, d, dtype=torch.bfloat16, device=oracle.DEVICE)
    k = torch.zeros(1, d, heads, d, dtype=torch.bfloat16, device=oracle.DEVICE)
    unit = torch.eye(d, dtype=torch.bfloat16, device=oracle.DEVICE)
    v = unit[None, :, None].expand_as(k).contiguous()
    state = torch.tensor(STATE, device=oracle.DEVICE)
    out = attngen.attention(
        q, k, v, dropout_p=0.5, rng_state=state, positions=positions, backend="cuda"
    )
    first, begin, _, head, sequence = (*positions, 0, 0, 0)[:5]
    mask = dropout_keep_mask(state, 0.5, sequence + 1, head + heads, first + s_q, begin + d)
    part = mask[sequence, head:, first:, begin:]
    assert torch.equal(out[0].permute(1, 0, 2) > 0, part)


def test_each_packed_sequence_stands_where_positions_say():
    tensors = [oracle.randn(150, 2, 64, dtype=torch.bfloat16, seed=n) for n in range(3)]
    ends = torch.tensor([0, 60, 60, 150], dtype=torch.int32, device=oracle.DEVICE)
    arguments = {
        "layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends, "mask": "causal",
        "positions": (20, 9), "alibi_slopes": True,
    }  # fmt: skip
    out, aux = attngen.attention(*tensors, **arguments, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, oracle.truth(*tensors, **arguments), "thd")


def test_gradient_of_a_bias_drops_what_the_whole_does():
    q, k, v = oracle.operands(1, 2, 2, 70, 80, 64, 64, torch.bfloat16)
    bias = oracle.randn(1, 1, 70, 80, dtype=torch.bfloat16, seed=5).requires_grad_()
    state = torch.tensor(STATE, device=oracle.DEVICE)
    arguments = {"dropout_p": 0.3, "rng_state": state, "positions": (19, 6), "mask": "causal"}

    def gradient(backend: str, *tensors: torch.Tensor) -> torch.Tensor:
        out = attngen.attention(*tensors, **arguments, backend=backend, bias=bias.to(q.dtype))
        return torch.autograd.grad(out.float().square().sum(), bias)[0]

    found, wanted = gradient("cuda", q, k, v), gradient("reference", q, k, v)
    assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()


# Head dim, heads, and what calls of packed or of dense sequences say beside positions of each.
OF_EACH = [
    (64, (4, 2), {"mask": "causal", "dropout_p": 0.2}),
    (128, (2, 1), {"window": (20, 5), "alibi_slopes": True}),
    (128, (2, 2), {"mask": "causal", "dropout_p": 0.1, "deterministic": True}),
    (192, (1, 1), {"mask": "causal", "dropout_p": 0.2}),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("dim", "heads", "more"), OF_EACH, ids=str)
def test_each_sequence_has_positions_of_its_own(dim, heads, more, packed):
    """Three sequences, one of which sees nothing, with their gradients."""
    rows, keys = 60, 72
    q, k, v = oracle.operands(3, *heads, rows, keys, dim, dim, torch.bfloat16)
    d_o = oracle.randn(*q.shape, dtype=q.dtype, seed=100)

    def of_each(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=oracle.DEVICE)

    arguments = {"positions": (of_each(32, 7, 0), of_each(0, 3, 900), of_each(20, 4, -900)), **more}
    arguments["positions"] += (1, of_each(5, 5, 2))
    if "dropout_p" in more:
        arguments["rng_state"] = torch.tensor(STATE, device=oracle.DEVICE)
    tensors = [q, k, v, d_o]
    if packed:
        tensors = [x.flatten(0, 1) for x in tensors]
        arguments |= {"layout": "thd", "cu_seqlens_q": of_each(0, 60, 100, 150)}
        arguments |= {"cu_seqlens_q_padded": of_each(0, 60, 110, 180)}
        arguments |= {"cu_seqlens_kv": of_each(0, 70, 142, 160)}
        arguments |= {"cu_seqlens_kv_padded": of_each(2, 72, 144, 216)}
    *tensors, d_o = tensors
    tensors = [x.requires_grad_() for x in tensors]
    out, aux = attngen.attention(*tensors, **arguments, backend="cuda", return_lse=True)
    found = torch.autograd.grad([out], tensors, [d_o])
    arguments.pop("deterministic", None)
    plain = [x.detach() for x in tensors]
    oracle.check(out, aux.lse, oracle.truth(*plain, **arguments), *(("thd",) if packed else ()))
    gradients.check(found, [*plain, d_o], None, **arguments)
