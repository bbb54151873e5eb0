"""Nested (jagged) tensors stand for packed tokens and their lengths."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import SpecError

LENGTHS = (3, 0, 5, 1)
OTHER = (2, 4, 0, 7)


def nest(lengths, heads=2, dim=8, seed=0, holes=False):
    torch.manual_seed(seed)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    if not holes:
        values = torch.randn(int(starts[-1]), heads, dim, requires_grad=True)
        return values, torch.nested.nested_tensor_from_jagged(values, starts)
    room = starts + 2 * torch.arange(len(lengths) + 1)
    values = torch.randn(int(room[-1]), heads, dim, requires_grad=True)
    found = torch.nested.nested_tensor_from_jagged(values, room, torch.tensor(lengths))
    return values, found


def like(nested, seed, heads=2, dim=8):
    torch.manual_seed(seed)
    values = torch.randn(nested.values().shape[0], heads, dim, requires_grad=True)
    offsets, lengths = nested.offsets(), nested.lengths()
    return values, torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal_bottom_right"])
def test_nested_call_is_that_of_the_packed_tokens(holes, mask):
    q_values, q = nest(LENGTHS, 4, seed=1, holes=holes)
    k_values, k = nest(OTHER, seed=2, holes=holes)
    v_values, v = like(k, 3, dim=6)
    arguments = {"layout": "thd", "mask": mask, "backend": "reference", "return_lse": True}
    out, aux = attngen.attention(q, k, v, **arguments)
    lengths = {}
    for side, lens, x in (("q", LENGTHS, q), ("kv", OTHER, k)):
        lengths[f"cu_seqlens_{side}"] = torch.tensor([0, *lens]).cumsum(0).int()
        if holes:
            lengths[f"cu_seqlens_{side}_padded"] = x.offsets().int()
    wanted, by = attngen.attention(q_values, k_values, v_values, **lengths, **arguments)
    assert out.is_nested and out.offsets() is q.offsets() and out.lengths() is q.lengths()
    assert torch.equal(out.values(), wanted) and torch.equal(aux.lse, by.lse)
    d_o = torch.randn_like(wanted)
    found = torch.autograd.grad(out.values(), (q_values, k_values, v_values), d_o)
    expected = torch.autograd.grad(wanted, (q_values, k_values, v_values), d_o)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_nested_packed_operands_and_dense_keys_are_taken():
    values, q = nest(LENGTHS, 2, seed=1)
    k = torch.randn(len(LENGTHS), 9, 2, 8)
    out = attngen.attention(q, k, k, layout="thd_bshd_bshd", backend="reference")
    lengths = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    wanted = attngen.attention(
        values, k, k, layout="thd_bshd_bshd", cu_seqlens_q=lengths, backend="reference"
    )
    assert torch.equal(out.values(), wanted)
    three = torch.randn(sum(LENGTHS), 3, 2, 8)
    qkv = torch.nested.nested_tensor_from_jagged(three, q.offsets())
    out = attngen.attention(qkv, layout="t3hd", backend="reference")
    wanted = attngen.attention(three, layout="t3hd", cu_seqlens_q=lengths, backend="reference")
    assert torch.equal(out.values(), wanted)


def test_nested_gradient_arrives_as_a_nested_tensor():
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    out = attngen.attention(q, q, q, layout="thd", backend="reference")
    out.values().sum().backward()
    assert q.grad.is_nested and q.grad.values().shape == (8, 2, 8)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layout": "bshd"}, "layout='thd'"),
        ({"k": None}, "needs k"),
        ({"k": torch.zeros(9, 2, 8)}, "k is not nested"),
        ({"q": torch.zeros(9, 2, 8)}, "q is not nested"),
        ({"v": nest(LENGTHS, seed=4)[1]}, "same offsets"),
        ({"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32)}, "leave it out"),
        ({"q": None}, "torch.jagged"),
    ],
)
def test_nested_operands_that_do_not_fit_are_refused(change, word):
    _, q = nest(LENGTHS, seed=1)
    _, k = nest(LENGTHS, seed=2)
    _, v = like(k, 3)
    if change == {"q": None}:
        change = {"q": torch.nested.nested_tensor([torch.zeros(3, 2, 8)])}
    with pytest.raises(SpecError, match=word):
        attngen.attention(**{"q": q, "k": k, "v": v, "layout": "thd", **change})


@pytest.mark.parametrize("kind", ["int64", "holes", "int32"])
def test_nested_shares_a_schedule_where_its_lengths_stay(kind):
    """Lengths made anew for each call could not be told from other lengths."""
    values, q = nest(LENGTHS, seed=1, holes=kind == "holes")
    if kind == "int32":
        q = torch.nested.nested_tensor_from_jagged(values, q.offsets().int())
    given = {"layout": "thd", "backend": "reference", "schedule": attngen.Schedule()}
    if kind == "int32":
        assert attngen.attention(q, q, q, **given).is_nested
    else:
        with pytest.raises(SpecError, match="make the lengths of a call anew"):
            attngen.attention(q, q, q, **given)
