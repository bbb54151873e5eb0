"""`score_mod` and `mask_mod`: what they may read, how they are mapped, what is refused."""

from __future__ import annotations

import functools
import linecache
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen
from attngen import SpecError
from attngen.frontends.pytorch import descriptions
from attngen.frontends.pytorch import routing as choice
from attngen.frontends.pytorch.callables import bits as callable_bits
from attngen.frontends.pytorch.callables import calls as callables

B, H, S, KEYS, D = 2, 4, 9, 11, 8
TABLE = torch.randn(KEYS, generator=torch.Generator().manual_seed(3))
ALL = dict(mask_mod=lambda b, h, i, j: i >= j)


def operands(seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = (B, S, H, D), (B, KEYS, H, D), (B, KEYS, H, D)
    return [torch.randn(shape, generator=make) for shape in shapes]


def causal(b, h, i, j):
    return i >= j


def by_head(b, h, i, j):
    """Another window for each head; the first head of the second sequence sees nothing."""
    return (i >= j) & (i - j <= h) & ((b == 0) | (h > 0))


HIDING = {
    "mask": {"mask": "causal"},
    "window": {"window": (4, 0)},
    "attn_mask": {"attn_mask": torch.ones(S, KEYS).tril().bool()},
    "mask_mod": {"mask_mod": causal},
    "mask_mod of heads": {"mask_mod": by_head},
    "block_mask": {
        "block_mask": create_block_mask(causal, None, None, S, KEYS, "cpu", BLOCK_SIZE=4)
    },
    "lengths": {"mask": "padding_causal", "seqused_kv": torch.tensor([5, 0], dtype=torch.int32)},
}


def relative(table, beyond):
    """Adds what `table` has of the distance; of a later key it reads beyond its end."""
    return lambda score, b, h, i, j: score + table[torch.where(i >= j, i - j, beyond)] * (1 + h)


@pytest.mark.parametrize("hiding", HIDING)
def test_hidden_pairs_read_nothing_out_of_range(hiding) -> None:
    given = {}
    for beyond in (1000, 0):
        leaves = [x.requires_grad_() for x in (*operands(), TABLE.clone())]
        out = attngen.attention(
            *leaves[:3], score_mod=relative(leaves[3], beyond), **HIDING[hiding]
        )
        given[beyond] = (out, *torch.autograd.grad(out.square().sum(), leaves))
    for found, wanted in zip(given[1000], given[0], strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.isfinite().all()


@pytest.mark.parametrize("hiding", [name for name in HIDING if name != "mask_mod of heads"])
def test_mask_mod_reads_nothing_for_what_other_masks_hide(hiding) -> None:
    def kept(beyond):
        return lambda b, h, i, j: TABLE[torch.where(i >= j, i - j, beyond)] > 0

    hidden = HIDING[hiding]
    if "mask_mod" in hidden:
        return
    found, wanted = (
        attngen.attention(*operands(), mask_mod=kept(beyond), **hidden) for beyond in (1000, 0)
    )
    assert torch.equal(found, wanted)


def test_block_mask_is_asked_for_its_partial_blocks_alone() -> None:
    masks = [create_block_mask(causal, None, None, S, KEYS, "cpu", BLOCK_SIZE=4) for _ in range(2)]
    shown = torch.ones(3, 3).tril().repeat_interleave(4, 0).repeat_interleave(4, 1)[:S, :KEYS]
    visible = torch.where(shown.bool(), TABLE.new_tensor(0), TABLE.new_tensor(1000)).long()
    masks[1].mask_mod = lambda b, h, i, j: (TABLE[visible[i, j]] < 1e9) & (i >= j)
    found, wanted = (attngen.attention(*operands(), block_mask=mask) for mask in masks[::-1])
    assert torch.equal(found, wanted)


def test_gradient_of_hidden_pairs_is_zero_whatever_the_derivative() -> None:
    """At a score of 0, which hidden pairs had, that of a root is infinite."""
    q, k, v = (x.abs().requires_grad_() for x in operands())
    out = attngen.attention(
        q, k, v, mask="causal", score_mod=lambda score, b, h, i, j: score.sqrt()
    )
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


# ---- transforms over captures


def mod_of(table):
    return lambda score, b, h, i, j: score * (1 + table[h]) + table[h] * (i - j)


@pytest.mark.parametrize("hiding", ["mask", "mask_mod of heads", "lengths"])
@pytest.mark.parametrize("wrap", [lambda f: f, torch.func.grad], ids=["", "grad"])
def test_vmap_over_captures_is_a_call_for_each(wrap, hiding) -> None:
    tensors, tables = operands(), torch.randn(3, H) / 8

    def loss(table):
        out, aux = attngen.attention(
            *tensors, score_mod=mod_of(table), return_lse=True, return_max_logit=True,
            **HIDING[hiding],
        )  # fmt: skip
        return out.square().sum() + aux.lse.clamp(min=-9).sum()

    wanted = torch.stack([wrap(loss)(table) for table in tables])
    torch.testing.assert_close(torch.vmap(wrap(loss))(tables), wanted)


def test_vmap_over_captures_of_a_mask_and_of_packed_tokens() -> None:
    ends = torch.tensor([0, 4, 4, 7])
    offsets = torch.tensor([1, 6, 6, 10])
    q, k, v = torch.randn(3, 12, H, D, generator=torch.Generator().manual_seed(0))
    documents = torch.randint(0, 2, (3, KEYS))

    def layer(document):
        return attngen.attention(
            q, k, v, layout="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends,
            cu_seqlens_q_padded=offsets, cu_seqlens_kv_padded=offsets,
            mask_mod=lambda b, h, i, j: document[i] == document[j],
        )  # fmt: skip

    wanted = torch.stack([layer(document) for document in documents])
    assert torch.equal(torch.vmap(layer)(documents), wanted)
    assert not wanted[:, :1].any() and not wanted[:, 5:6].any()  # rows of no sequence


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("hiding", [{}, *HIDING.values()], ids=["nothing", *HIDING])
def test_callable_compiles_without_a_break(hiding) -> None:
    if "block_mask" in hiding:
        return  # of which torch traces some

    def layer(q, k, v, table):
        return attngen.attention(q, k, v, score_mod=mod_of(table), **hiding)

    tensors = (*operands(), torch.randn(H) / 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    if "seqused_kv" in hiding:
        return  # whose lengths it would wait for
    torch.testing.assert_close(compiled(*tensors), layer(*tensors))


# ---- refusals


def with_branch(score, b, h, i, j):
    if i > j:
        return score
    return -score


def in_place(score, b, h, i, j):
    return TABLE.mul_(score)


COUNT = torch.zeros(())


def counting(score, b, h, i, j):
    COUNT.add_(1)
    return score


SCORE_MODS = {
    "branch": (with_branch, "branches on a tensor", "torch.where"),
    "random": (lambda s, b, h, i, j: s + torch.rand(()), "draws random numbers", "dropout_p"),
    "dropout": (
        lambda s, b, h, i, j: torch.nn.functional.dropout(s, 0.5),
        "draws random numbers",
        "dropout_p",
    ),
    "item": (lambda s, b, h, i, j: s * s.item(), "reads a number out of a tensor", "tensors alone"),
    "int": (lambda s, b, h, i, j: s * int(i), "reads a number out of a tensor", "tensors alone"),
    "few": (lambda s, b: s, "is called as score_mod(score, b, h, i, j)", "(s, b)"),
    "many": (lambda s, b, h, i, j, x: s, "is called as score_mod(score, b, h, i, j)", "x"),
    "partial": (functools.partial(with_branch, j=0), "is called as score_mod", "arguments"),
    "text": (lambda s, b, h, i, j: "x", "needs to return one number", "'x'"),
    "pair": (lambda s, b, h, i, j: (s, s), "needs to return one number", "tuple"),
    "nothing": (lambda s, b, h, i, j: None, "needs to return one number", "None"),
    "vector": (lambda s, b, h, i, j: s + TABLE, "needs to return one number", "[11]"),
    "bool": (lambda s, b, h, i, j: i > j, "needs to return a score", "torch.where"),
    "complex": (lambda s, b, h, i, j: s * 1j, "needs to return a score", "complex64"),
    "in place": (in_place, "score_mod", "in place"),
    "in place, unseen": (counting, "changes a captured tensor in place", "new tensor"),
    "name": (lambda s, b, h, i, j: s + missing, "NameError", "missing"),  # noqa: F821
    "own error": (lambda s, b, h, i, j: {}[s], "fails at", "KeyError"),
    "dynamic": (lambda s, b, h, i, j: s + (i > 0).nonzero().sum(), "fails at", "without axes"),
    "out of range": (lambda s, b, h, i, j: s + TABLE[j + 5], "reads out of range", "clamp"),
}
MASK_MODS = {
    "branch": (lambda b, h, i, j: True if i > j else False, "branches on a tensor", "torch.where"),
    "floats": (lambda b, h, i, j: i * 1.5, "needs to return a bool", "float32"),
    "integers": (lambda b, h, i, j: i - j, "needs to return a bool", "int32"),
    "few": (lambda b, h, i: i > 0, "is called as mask_mod(b, h, i, j)", "(b, h, i)"),
    "plain": (lambda b, h, i, j: True, "needs to return one number", "True"),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", SCORE_MODS)
def test_bad_score_mod_is_refused_with_reason(case, backend) -> None:
    mod, *words = SCORE_MODS[case]
    with pytest.raises(SpecError) as refusal:
        attngen.attention(*operands(), score_mod=mod, backend=backend)
    text = str(refusal.value)
    assert text.startswith("score_mod ") and all(word in text for word in words), text
    assert len(text) < 500


@pytest.mark.parametrize("case", MASK_MODS)
def test_bad_mask_mod_is_refused_with_reason(case) -> None:
    mod, *words = MASK_MODS[case]
    with pytest.raises(SpecError) as refusal:
        attngen.attention(*operands(), mask_mod=mod)
    text = str(refusal.value)
    assert text.startswith("mask_mod ") and all(word in text for word in words), text


def test_refusal_says_the_line() -> None:
    with pytest.raises(SpecError) as refusal:
        attngen.attention(*operands(), score_mod=with_branch)
    number = with_branch.__code__.co_firstlineno + 1
    assert linecache.getline(__file__, number).strip() == "if i > j:"
    assert f"test_calls.py:{number}, `if i > j:`" in str(refusal.value)


def test_refusal_of_its_kernels_is_what_a_call_with_a_schedule_says() -> None:
    other = SpecError("made for other lengths")
    refused = mock.patch.object(callables, "attend", side_effect=other)
    given: dict[str, Any] = {"schedule": attngen.Schedule(), "backend": "cuda"}
    with refused, pytest.raises(SpecError, match="made for other lengths"):
        attngen.attention(*operands(), **ALL, **given)


def test_masks_that_are_too_large_leave_each_call_to_the_reference() -> None:
    tensors = [x.bfloat16() for x in operands()]
    arch = mock.patch.object(descriptions, "device_arch", lambda _: "sm_90a")
    with arch, mock.patch.object(callable_bits, "MOST_BYTES", 0):
        found = [attngen.attention(*tensors, mask_mod=by_head) for _ in range(3)]
    wanted = attngen.attention(*tensors, mask_mod=by_head, backend="reference")
    assert all(torch.equal(each, wanted) for each in found)


def test_refusal_leaves_what_it_was_made_from() -> None:
    with pytest.raises(SpecError) as refusal:
        attngen.attention(*operands(), score_mod=lambda s, b, h, i, j: {}["key"])
    assert isinstance(refusal.value.__cause__, KeyError)


def test_memory_that_runs_out_is_no_fault_of_the_callable() -> None:
    def hungry(score, b, h, i, j):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        attngen.attention(*operands(), score_mod=hungry)


# ---- what is checked on demand


def embedded(score, b, h, i, j):
    return score + torch.nn.functional.embedding(j + 3, TABLE[:, None])[0]


READS = {
    "indexing": lambda s, b, h, i, j: s + TABLE[j + 3],
    "two axes": lambda s, b, h, i, j: s + TABLE.view(1, KEYS)[b * 0, j + 3],
    "from the end": lambda s, b, h, i, j: s + TABLE[-j - 4],
    "index_select": lambda s, b, h, i, j: s + TABLE.index_select(0, (j + 3)[None])[0],
    "gather": lambda s, b, h, i, j: s + TABLE.gather(0, (j + 3).long()[None])[0],
    "take": lambda s, b, h, i, j: s + TABLE.take((j + 3).long()),
    "embedding": embedded,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("read", READS)
def test_reads_out_of_range_are_named_on_demand(read, monkeypatch) -> None:
    monkeypatch.setattr(choice, "CHECK_VALUES", True)
    with pytest.raises(SpecError) as refusal:
        attngen.attention(*operands(), score_mod=READS[read])
    text = str(refusal.value)
    assert text.startswith("score_mod reads index")
    pair = "" if read == "take" else ", head 0, query 0 and key 8"  # whose calls are one a pair
    assert f"for sequence 0{pair}, which" in text, text
    attngen.attention(*operands(), score_mod=READS[read], attn_mask=torch.arange(KEYS) < 8)


def test_mask_that_reads_out_of_range_is_named_on_demand(monkeypatch) -> None:
    monkeypatch.setattr(choice, "CHECK_VALUES", True)
    with pytest.raises(SpecError, match="mask_mod reads index 11 .*key 8, which take part"):
        attngen.attention(*operands(), mask_mod=lambda b, h, i, j: TABLE[j + 3] < 9)


def test_checked_call_computes_the_same(monkeypatch) -> None:
    given = {"score_mod": relative(TABLE, 1000), "mask": "causal"}
    wanted = attngen.attention(*operands(), **given)
    monkeypatch.setattr(choice, "CHECK_VALUES", True)
    assert torch.equal(attngen.attention(*operands(), **given), wanted)
