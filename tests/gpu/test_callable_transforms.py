"""Callables within transforms of torch.func, and in checkpoints: kernels serve them as they serve
each call alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import attngen

from . import oracle

pytestmark = pytest.mark.gpu

TABLE = torch.tensor([[0.5, 1.0], [2.0, -0.25]])


def mods(table: Tensor) -> dict[str, dict[str, Any]]:
    """Functions that tell sequences apart, each like none of another test."""
    score = {"score_mod": lambda s, b, h, i, j: s * table[b, h] + b * 0.5}
    mask = {"mask_mod": lambda b, h, i, j: (i + j + b) % 3 != 0}
    return {"score": score, "mask": mask, "both": score | mask}


@pytest.mark.parametrize("name", ["score", "mask", "both"])
def test_transforms_run_kernels_and_change_nothing(name) -> None:
    given = mods(TABLE.to(oracle.DEVICE))[name]
    several = [torch.stack([x, x / 2, -x]) for x in oracle.operands(2, 2, 2, 40, 40, 64)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attngen.attention(q, k, v, backend="cuda", **given)
        return out

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).float().square().sum()

    with attngen.trace() as seen:  # the first that sees the functions
        gradients = vmap(grad(loss, argnums=(0, 1, 2)))(*several)
    assert seen.variants
    outs = vmap(attend)(*several)
    for n, operands in enumerate(zip(*several, strict=True)):
        leaves = [x.clone().requires_grad_() for x in operands]
        assert torch.equal(outs[n], attend(*operands))
        wanted = torch.autograd.grad(loss(*leaves), leaves)
        assert all(torch.equal(one[n], other) for one, other in zip(gradients, wanted, strict=True))


def test_masks_of_each_sample_beside_a_function_are_right() -> None:
    operands = [torch.stack([x, -x]) for x in oracle.operands(2, 2, 2, 20, 20, 64)]
    steps = torch.tensor((3, 4), device=oracle.DEVICE).view(2, 1, 1, 1, 1)
    shown = torch.arange(20, device=oracle.DEVICE) % steps > 0

    def attend(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        given: dict[str, Any] = {"mask_mod": lambda b, h, i, j: (2 * i + j + b) % 5 != 0}
        out: Tensor = attngen.attention(q, k, v, attn_mask=shown, **given)
        return out

    found = vmap(attend)(*operands, shown)
    for n, own in enumerate(zip(*operands, shown, strict=True)):
        wanted = attend(*own)
        torch.testing.assert_close(found[n], wanted, rtol=0.02, atol=0.02)


def test_functions_that_read_what_is_transformed_are_left_to_the_reference() -> None:
    q, k, v = oracle.operands(1, 2, 2, 20, 20, 64)
    heat = torch.ones(2, device=oracle.DEVICE)

    def loss(heat: Tensor) -> Tensor:
        out = attngen.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * heat[h])
        return out.float().square().sum()

    leaf = heat.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(grad(loss)(heat), wanted, rtol=0.05, atol=0.05)


def test_checkpoints_make_scores_anew_with_gradients_of_what_they_captured() -> None:
    operands = [x.requires_grad_() for x in oracle.operands(2, 2, 2, 40, 40, 64)]
    leaf = TABLE.to(oracle.DEVICE).requires_grad_()
    given = mods(leaf)["both"]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attngen.attention(q, k, v, backend="cuda", deterministic=True, **given)
        return out.float().square().sum()

    wanted = torch.autograd.grad(loss(*operands), [*operands, leaf])
    kept = checkpoint(loss, *operands, use_reentrant=False)
    found = torch.autograd.grad(kept, [*operands, leaf])
    assert all(map(torch.equal, found, wanted))


def test_tensors_that_transforms_map_and_derive_are_operands() -> None:
    """A score learns them, and a mask reads some; each sample is as its own call has it."""
    operands = oracle.operands(2, 2, 2, 40, 40, 64)
    tables = torch.stack([TABLE, TABLE / 2, -TABLE]).to(oracle.DEVICE)
    places = torch.arange(40, device=oracle.DEVICE)
    documents = torch.stack([places // n for n in (7, 11, 40)])

    def loss(table: Tensor, document: Tensor) -> Tensor:
        twice = 2 * table

        def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + twice[b, h] * 0.1 * (i - j)

        given: dict[str, Any] = {"mask_mod": lambda b, h, i, j: document[i] == document[j]}
        out: Tensor = attngen.attention(*operands, score_mod=score_mod, backend="cuda", **given)
        return out.float().square().mean()

    with attngen.trace() as seen:
        mapped = vmap(grad(loss))(tables, documents)
    assert len(seen.variants) >= 3  # of a mask, a forward, and gradients
    for n, (table, document) in enumerate(zip(tables, documents, strict=True)):
        leaf = table.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(leaf, document), leaf)
        torch.testing.assert_close(mapped[n], wanted, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(grad(loss)(table, document), wanted, rtol=1e-3, atol=1e-5)


def test_block_masks_and_leaves_within_transforms_run_kernels() -> None:
    operands = [torch.stack([x, -x]) for x in oracle.operands(2, 2, 2, 40, 40, 64)]
    leaf = TABLE.to(oracle.DEVICE).requires_grad_()

    def odd(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % 3 != 1

    blocks = create_block_mask(odd, None, None, 40, 40, str(oracle.DEVICE), BLOCK_SIZE=16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s * leaf[b, h]

        given: dict[str, Any] = {"score_mod": score_mod, "block_mask": blocks}
        out: Tensor = attngen.attention(q, k, v, backend="cuda", **given)
        return out

    found = vmap(attend)(*operands)
    wanted = torch.stack([attend(*one) for one in zip(*operands, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    one, other = (torch.autograd.grad(x.float().square().sum(), leaf)[0] for x in (found, wanted))
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_gradients_of_gradients_are_the_references() -> None:
    q, k, v = (x.float() for x in oracle.operands(1, 1, 1, 8, 8, 16))

    def loss(table: Tensor, backend: str) -> Tensor:
        given: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s * table[h].sin()}
        halves = (x.bfloat16() for x in (q, k, v))
        return attngen.attention(*halves, backend=backend, **given).float().square().sum()

    table = torch.tensor([0.7], device=oracle.DEVICE)

    def twice(backend: str) -> Tensor:
        found: Tensor = grad(lambda x: grad(loss)(x, backend).sum())(table)
        return found

    torch.testing.assert_close(twice("auto"), twice("reference"))
