"""Masks of fragments, named in calls: both directions, where lengths are equal, packed or told,
keys are split, and beside what calls have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen import AttentionSpec

from . import gradients, oracle, varlen

pytestmark = pytest.mark.gpu

Arguments = dict[str, Any]
CHUNKED: Arguments = {"mask": "chunked", "chunked": 48}
LATEST: Arguments = {"mask": ["chunked", "causal"], "chunked": 100}
PREFIX: Arguments = {"mask": "prefix", "prefix": 70}
ENDS: Arguments = {"mask": "prefix_bottom_right", "prefix": 128}
BESIDE: Arguments = {"mask": "causal+chunked", "chunked": 64, "window": (20, -1)}
MASKS = {"chunked": CHUNKED, "latest": LATEST, "prefix": PREFIX, "ends": ENDS, "beside": BESIDE}
EACH = pytest.mark.parametrize("name", MASKS)
NAMES = ("chunked", "causal+chunked", "prefix")
KERNELS = [
    *(AttentionSpec(head_dim=64, mask=name, directions=("fwd", "bwd")) for name in NAMES),
    *(AttentionSpec(head_dim=64, mask=name, layout="thd", directions=("fwd", "bwd"))
      for name in NAMES),
    *(AttentionSpec(head_dim=64, mask=name, decode=True) for name in NAMES),
]  # fmt: skip


def on_device(arguments: Arguments) -> Arguments:
    return {k: x.to(oracle.DEVICE) if torch.is_tensor(x) else x for k, x in arguments.items()}


def check_gradients(tensors, **arguments) -> None:
    """The gradients of a call on the kernels, held to the rule. tensors: q, k, v, d_o."""
    *operands, d_o = tensors
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    out = attngen.attention(*leaves, **arguments, backend="cuda")
    found = torch.autograd.grad(out, leaves, d_o)
    arguments.pop("deterministic", None)
    gradients.check(found, tensors, None, **arguments)


@EACH
@pytest.mark.parametrize("d", [64, 128])
def test_masks_of_fragments_forward_is_right(name, d) -> None:
    q, k, v = oracle.operands(2, 4, 2, 200, 270, d)
    oracle.check_call(q, k, v, **on_device(MASKS[name]))


@EACH
@pytest.mark.parametrize("deterministic", [False, True])
def test_masks_of_fragments_gradients_are_right(name, deterministic) -> None:
    q, k, v = oracle.operands(1, 4, 2, 200, 270, 64)
    d_o = oracle.randn(*q.shape, dtype=q.dtype, seed=5)
    check_gradients((q, k, v, d_o), **on_device(MASKS[name]), deterministic=deterministic)


@pytest.mark.parametrize("name", ["latest", "ends"])
def test_masks_of_fragments_gradients_of_wide_heads_are_right(name) -> None:
    q, k, v = oracle.operands(1, 2, 1, 130, 150, 256)
    d_o = oracle.randn(*q.shape, dtype=q.dtype, seed=5)
    check_gradients((q, k, v, d_o), **on_device(MASKS[name]))


def test_prefix_of_each_sequence_is_its_own() -> None:
    q, k, v = oracle.operands(3, 2, 2, 150, 190, 64)
    d_o = oracle.randn(*q.shape, dtype=q.dtype, seed=5)
    strided = torch.tensor([[0, 7], [64, 7], [187, 7]], dtype=torch.int32)[:, 0]
    arguments = on_device({"mask": "prefix", "prefix": strided})
    oracle.check_call(q, k, v, **arguments)
    check_gradients((q, k, v, d_o), **arguments)


def packed(lengths: tuple[int, ...], d: int = 64) -> tuple[torch.Tensor, ...]:
    tokens = sum(lengths)
    q, k, v, d_o = (oracle.randn(tokens, 2, d, dtype=torch.bfloat16, seed=n) for n in range(4))
    ends = torch.tensor((0, *lengths)).cumsum(0).int().to(oracle.DEVICE)
    return q, k, v, d_o, ends


@pytest.mark.parametrize("name", ["chunked", "latest", "prefix", "each"])
def test_masks_of_fragments_of_packed_tokens_are_right(name) -> None:
    q, k, v, d_o, ends = packed((130, 1, 0, 70))
    each = {"mask": "prefix", "prefix": torch.tensor([5, 1, 3, 66], dtype=torch.int32)}
    arguments = on_device(MASKS.get(name, each))
    lengths = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    expected = oracle.truth(q, k, v, **arguments, **lengths)
    out, aux = attngen.attention(q, k, v, **arguments, **lengths, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, expected, "thd")
    check_gradients((q, k, v, d_o), **arguments, **lengths)


@pytest.mark.parametrize("name", ["chunked", "prefix"])
def test_masks_of_fragments_where_lengths_are_told_are_right(name) -> None:
    q, k, v = oracle.operands(3, 2, 2, 100, 180, 64)
    lengths = {"seqused_q": varlen.int32((100, 0, 33)), "seqused_kv": varlen.int32((180, 5, 97))}
    arguments = on_device(MASKS[name])
    arguments["mask"] = [arguments["mask"], "padding"]
    oracle.check_call(q, k, v, **arguments, **lengths)


@pytest.mark.parametrize("name", ["chunked", "latest", "ends"])
def test_masks_of_fragments_where_keys_are_split_are_right(name) -> None:
    q, k, v = oracle.operands(2, 4, 2, 3, 700, 64)
    arguments = {**on_device(MASKS[name]), "bottom_right": True, "num_splits": 3}
    wanted = {key: x for key, x in arguments.items() if key != "num_splits"}
    expected = oracle.truth(q, k, v, **wanted)
    out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, expected)


def test_masks_of_fragments_in_any_order_are_one_kernel_and_calls_are_kept() -> None:
    q, k, v = oracle.operands(1, 2, 2, 64, 64, 64)
    with attngen.trace() as seen:
        results = [
            attngen.attention(q, k, v, mask=mask, chunked=n, backend="cuda")
            for n in (16, 16, 40)
            for mask in (["causal", "chunked"], ["chunked", "causal"], "chunked+causal")
        ]
    assert len(seen.variants) == 1
    assert oracle.same(results[:5], results[1:6]) and not torch.equal(results[0], results[-1])


def test_operands_of_fragments_get_no_gradient_but_by_the_reference() -> None:
    q, k, v = oracle.operands(1, 2, 2, 64, 64, 64)
    with pytest.raises(attngen.SpecError, match="fragment_0 is prefix, int32"):
        torch.ops.attngen.forward(q, k, v, mask="prefix", fragment_0=q[0, 0, :1, 0], numbers="0")
    with pytest.raises(attngen.SpecError, match="numbers"):
        torch.ops.attngen.forward(q, k, v, mask="prefix")
