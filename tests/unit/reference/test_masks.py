"""Masks of the reference: bands by their definition, callables and BlockMasks of torch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from attngen.reference import attention, visible
from attngen.spec.masks import PLAIN_MASKS as MASKS

# Eager flex_attention is slow, which is no concern for an oracle.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

sizes = st.integers(0, 9)
sides = st.one_of(st.none(), st.integers(-1, 6))


@settings(max_examples=150, deadline=None)
@given(
    s_q=sizes, s_kv=sizes, left=sides, right=sides, mask=st.sampled_from(MASKS), low=st.booleans()
)
def test_visible_any_band_follows_the_inequalities(s_q, s_kv, left, right, mask, low):
    aligned = low or mask.endswith("bottom_right")
    got = visible(s_q, s_kv, mask=mask, window=(left, right), bottom_right=aligned)
    delta = s_kv - s_q if aligned else 0
    assert got.shape == (s_q, s_kv)
    for i, j in itertools.product(range(s_q), range(s_kv)):
        in_left = left in (None, -1) or j >= i + delta - left
        limit = 0 if "causal" in mask else right
        in_right = limit in (None, -1) or j <= i + delta + limit
        assert got[i, j] == (in_left and in_right)


@pytest.mark.parametrize("mask", MASKS)
def test_visible_alignment_left_open_follows_the_masks_name(mask):
    by_name = visible(3, 5, mask=mask, window=(1, 1))
    spelled = visible(3, 5, mask=mask, window=(1, 1), bottom_right=mask.endswith("bottom_right"))
    other = visible(3, 5, mask=mask, window=(1, 1), bottom_right=not mask.endswith("bottom_right"))
    assert torch.equal(by_name, spelled)
    assert not torch.equal(by_name, other)


def test_visible_window_without_right_side_never_shows_the_future():
    for mask in MASKS:
        seen = visible(6, 6, mask=mask, window=(2, 0), bottom_right=None)
        assert not seen.triu(1).any()


def operands(b, h, s_q, s_kv, d=8):
    make = torch.Generator().manual_seed(0)
    shapes = [(b, h, s_q, d), (b, h, s_kv, d), (b, h, s_kv, d)]
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


def test_score_mod_equals_flex_attention():
    q, k, v = operands(2, 3, 16, 24)
    table = torch.randn(3, 16, 24, dtype=torch.float64)

    def score_mod(score, b, h, i, j):
        return torch.where(i >= j, score + table[h, i, j] * (b + 1), float("-inf"))

    got, aux = attention(q, k, v, layout="bhsd", score_mod=score_mod)
    want, want_aux = flex_attention(q, k, v, score_mod=score_mod, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(aux.lse, want_aux.lse)


def test_block_mask_equals_flex_attention_and_its_mask_mod():
    q, k, v = operands(2, 3, 40, 56)
    documents = torch.arange(56) // 11

    def mask_mod(b, h, i, j):
        # The blocks, not only the positions in them, differ between sequences and heads.
        return ((documents[i] == documents[j]) != (b == 1)) | (j < 17 * h)

    block_mask = create_block_mask(mask_mod, 2, 3, 40, 56, device="cpu", BLOCK_SIZE=16)
    by_blocks, _ = attention(q, k, v, layout="bhsd", block_mask=block_mask)
    by_mod, _ = attention(q, k, v, layout="bhsd", mask_mod=mask_mod)
    assert torch.equal(by_blocks, by_mod)
    torch.testing.assert_close(by_blocks, flex_attention(q, k, v, block_mask=block_mask))


def test_block_mask_of_bare_block_lists_shows_exactly_the_listed_blocks():
    q, k, v = operands(1, 2, 8, 12)
    # Row 0 lists block 2, row 1 none; 9 and -1 stand where the lists are unspecified.
    counts = torch.tensor([[[1, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 9, -1], [-1, 0, 0]]]], dtype=torch.int32)
    full_counts = torch.tensor([[[0, 2]]], dtype=torch.int32)
    full_indices = torch.tensor([[[[0, 0, 0], [2, 0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(
        counts,
        indices.clamp(0, 2),
        full_counts,
        full_indices,
        BLOCK_SIZE=4,
        mask_mod=lambda b, h, i, j: (i + j) % 2 == 0,
        compute_q_blocks=False,
        seq_lengths=(8, 12),
    )
    block_mask.kv_indices = indices
    seen = torch.zeros(8, 12, dtype=torch.bool)
    even = (torch.arange(8)[:, None] + torch.arange(12)) % 2 == 0
    seen[:4, 8:] = even[:4, 8:]
    seen[4:, 8:] = True
    seen[4:, :4] = True
    got, _ = attention(q, k, v, layout="bhsd", block_mask=block_mask)
    want, _ = attention(q, k, v, layout="bhsd", attn_mask=seen)
    assert torch.equal(got, want)


def test_masks_of_every_kind_intersect():
    q, k, v = operands(2, 3, 7, 9)
    allowed = torch.rand(2, 1, 7, 9) > 0.3
    block_mask = create_block_mask(
        lambda b, h, i, j: i + j > 2, None, None, 7, 9, device="cpu", BLOCK_SIZE=4
    )
    got, _ = attention(
        q,
        k,
        v,
        layout="bhsd",
        mask="causal_bottom_right",
        window=(4, -1),
        attn_mask=allowed,
        mask_mod=lambda b, h, i, j: (i * j + h) % 4 != 0,
        block_mask=block_mask,
    )
    h, i, j = torch.meshgrid(torch.arange(3), torch.arange(7), torch.arange(9), indexing="ij")
    seen = (j <= i + 2) & (j >= i - 2) & (i + j > 2) & ((i * j + h) % 4 != 0)
    want, _ = attention(q, k, v, layout="bhsd", attn_mask=allowed & seen)
    assert torch.equal(got, want)
