"""Masks of callables where kernels read their bits and visit what else they would: beside biases,
over pages, of wide heads and in 8 bits; and packed tokens, whose kernels visit what masks show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import attngen
from attngen.frontends.pytorch.callables import listed as callable_listed
from attngen.frontends.pytorch.callables.bits import maker_of

from . import oracle, oracle_fp8, test_bias, test_decode
from .test_made_masks import HEADS, KEYS, MODS, ROWS, documents
from .test_made_masks import check as check_dense
from .varlen import Call, check

pytestmark = pytest.mark.gpu


@contextmanager
def made() -> Iterator[None]:
    """A mask is made by its kernel meanwhile."""
    with mock.patch.object(callable_listed, "maker_of", wraps=maker_of) as spy:
        yield
    assert spy.called


@pytest.mark.slow
@pytest.mark.parametrize(("d", "kind", "sizes", "deterministic"), [
    (64, "post_scale", (1, HEADS, ROWS, KEYS), False),
    (128, "post_scale", (1, 1, 1, KEYS), False),
    (128, "pre_scale", (2, HEADS, ROWS, KEYS), True),
])  # fmt: skip
def test_gradients_beside_a_bias_are_right(d, kind, sizes, deterministic) -> None:
    bias = oracle.randn(*sizes, dtype=torch.bfloat16, seed=50)
    mod = documents(oracle.DEVICE)
    arguments: dict[str, Any] = {"mask_mod": mod, "bias": bias, "bias_type": kind}
    operands = oracle.operands(2, HEADS, 1, ROWS, KEYS, d)
    with made():
        test_bias.check_call_gradients(operands, arguments, "bshd", deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.wgmma
def test_wide_heads_are_right() -> None:
    check_dense(512, documents(oracle.DEVICE))


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("s_q", [1, 130])
def test_forward_over_pages_is_right(s_q, name) -> None:
    mod = MODS[name](oracle.DEVICE)
    pages = test_decode.cache([300, KEYS], 1, 128, 64)
    with made():
        test_decode.check(test_decode.queries(2, s_q, HEADS, 128), pages, mask_mod=mod)


@pytest.mark.slow
@pytest.mark.wgmma
def test_forward_in_8_bits_reads_the_bits_of_booleans() -> None:
    q, k, v = oracle_fp8.operands(2, HEADS, 1, ROWS, KEYS, 128)
    mod, device = documents(oracle.DEVICE), oracle.DEVICE
    b, h, i, j = torch.meshgrid(
        *[torch.arange(n, device=device) for n in (2, HEADS, ROWS, KEYS)], indexing="ij"
    )
    with made():
        found = attngen.attention(q, k, v, mask_mod=mod, backend="cuda")
    assert torch.equal(found, attngen.attention(q, k, v, attn_mask=mod(b, h, i, j), backend="cuda"))


class Masked(Call):
    """A call with a mask that tells sequences apart."""

    def arguments(self) -> dict[str, Any]:
        """Keys that the parity of a sequence's number shows, beside the nearest."""
        return {
            **super().arguments(),
            "mask_mod": lambda b, h, i, j: ((j // 16 + b) % 2 == 0) | ((i - j).abs() < 9),
        }


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_packed_tokens_count_from_where_their_sequences_begin(gaps, deterministic) -> None:
    call = Masked("thd", (90, 0, 201), d=128, heads=(HEADS, 1), gaps=gaps)
    with made():
        check(call, deterministic=deterministic)
