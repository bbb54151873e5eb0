"""TransformerEngine's words in JAX: what they mean here, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from attngen.jax import (  # noqa: E402
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    ReorderStrategy,
    SequenceDescriptor,
    attention,
    fused_attn,
    inverse_reorder_causal_load_balancing,
    is_fused_attn_kernel_available,
    make_swa_mask,
    reorder_causal_load_balancing,
)
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from attngen import SpecError  # noqa: E402
from attngen.frontends.jax.names import canonicalize_attn_mask_type  # noqa: E402

jnp = jax.numpy
B, S, H, K, D = 2, 8, 4, 2, 8


def random(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32))


Q, KEY, VALUE = random(B, S, H, D), random(B, S, K, D), random(B, S, K, D, seed=1)
WORDS: dict[str, Any] = {
    "bias": None,
    "sequence_descriptor": None,
    "seed": None,
    "attn_bias_type": AttnBiasType.NO_BIAS,
    "attn_mask_type": AttnMaskType.CAUSAL_MASK,
    "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
    "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
    "scaling_factor": 0.3,
    "dropout_probability": 0.0,
    "is_training": True,
}
IDS = np.array([[1, 1, 1, 2, 2, 0, 3, 3], [1, 1, 1, 1, 1, 1, 0, 0]], np.int32)
SHORTER = np.array([[1, 1, 2, 2, 2, 2, 3, 0], [1, 1, 1, 1, 0, 0, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 0, 0]], np.int32)
LENGTHS = np.array([[3, 2, 2], [6, -1, -1]], np.int32)
OFFSETS = np.array([[0, 3, 6, 8], [0, 6, -1, -1]], np.int32)
SEGMENTS = {
    "ids": (SequenceDescriptor.from_segment_ids_and_pos, IDS, POSITIONS),
    "offsets": (SequenceDescriptor.from_seqlens_and_offsets, LENGTHS, OFFSETS),
}


def close(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape and np.allclose(found, wanted, atol=1e-5)


def test_bias_and_offset_of_a_learnable_softmax() -> None:
    bias, offset = random(1, H, S, S), random(1, H, 1, 1)

    def run(bias: Any, offset: Any) -> Any:
        words = {**WORDS, "bias": bias, "attn_bias_type": AttnBiasType.PRE_SCALE_BIAS}
        words |= {"softmax_type": AttnSoftmaxType.from_str("learnable"), "window_size": (4, 0)}
        out = fused_attn((Q, KEY, VALUE), **words, softmax_offset=offset)
        return (out**2).sum(), out

    gradients, out = jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(bias, offset)
    wanted = attention(
        *(Q, KEY, VALUE),
        mask="causal",
        window=(4, 0),
        bias=bias,
        bias_type="pre_scale",
        softmax="learnable",
        sink=offset.reshape(-1),
        softmax_scale=0.3,
    )
    close(out, wanted)
    assert [x.shape for x in gradients] == [bias.shape, offset.shape]
    assert all(x.any() for x in gradients)


@pytest.mark.parametrize(("describe", "one", "other"), SEGMENTS.values(), ids=SEGMENTS)
def test_segments_of_a_row_see_themselves_alone(describe: Any, one: Any, other: Any) -> None:
    described = jax.jit(describe)(jnp.asarray(one), jnp.asarray(other))
    words = {**WORDS, "attn_mask_type": AttnMaskType.PADDING_CAUSAL_MASK}
    words |= {"qkv_layout": QKVLayout.THD_T2HD, "sequence_descriptor": described}
    packed = jnp.stack([KEY, VALUE], axis=2)
    run = jax.jit(lambda q, kv: fused_attn((q, kv), **words, max_segments_per_seq=3))
    together = (IDS[:, :, None] == IDS[:, None, :]) & (IDS[:, :, None] > 0)
    wanted = attention(
        Q, KEY, VALUE, mask="causal", attn_mask=together[:, None], softmax_scale=0.3
    )
    close(run(Q, packed), wanted)


LENGTHS_OF_ROWS = np.array([5, 8], np.int32)
SHOWN = np.arange(S) < LENGTHS_OF_ROWS[:, None]
ROWS = {
    "lengths": lambda lengths, _: SequenceDescriptor.from_seqlens((lengths, lengths)),
    "ids": lambda _, shown: SequenceDescriptor.from_segment_ids_and_pos(
        shown.astype(jnp.int32), jnp.zeros((B, S), jnp.int32)
    ),
    "mask": lambda _, shown: ~(shown[:, None, :, None] & shown[:, None, None, :]),
}


@pytest.mark.parametrize("describe", ROWS.values(), ids=ROWS)
def test_lengths_of_rows(describe: Any) -> None:
    described = jax.jit(describe)(jnp.asarray(LENGTHS_OF_ROWS), jnp.asarray(SHOWN))
    words = {**WORDS, "attn_mask_type": AttnMaskType.PADDING_MASK, "sequence_descriptor": described}
    used = dict.fromkeys(("seqused_q", "seqused_kv"), jnp.asarray(LENGTHS_OF_ROWS))
    wanted = attention(Q, KEY, VALUE, mask="padding", **used, softmax_scale=0.3)
    close(fused_attn((Q, KEY, VALUE), **words), wanted)
    leaves, tree = jax.tree.flatten(described)
    close(fused_attn((Q, KEY, VALUE), **{**words, "sequence_descriptor": tree.unflatten(leaves)}),
          wanted)  # fmt: skip


def test_dropout_takes_the_first_seed_and_only_while_training() -> None:
    words = {**WORDS, "dropout_probability": 0.5}
    seeds = jax.random.split(jax.random.key(3), 8)
    dropped = fused_attn((Q, KEY, VALUE), **{**words, "seed": seeds})
    wanted = attention(
        Q, KEY, VALUE, mask="causal", softmax_scale=0.3, dropout_p=0.5, rng_state=seeds[0]
    )
    close(dropped, wanted)
    whole = fused_attn((Q, KEY, VALUE), **{**words, "is_training": False})
    close(whole, attention(Q, KEY, VALUE, mask="causal", softmax_scale=0.3))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"context_parallel_axis": "cp"}, "axis='cp' is no axis of a jax.shard_map"),
        ({"stripe_size": 2}, "stripe_size belongs to context_parallel_axis"),
        (
            {
                "context_parallel_axis": "cp",
                "qkv_layout": QKVLayout.THD_THD_THD,
                "attn_mask_type": AttnMaskType.PADDING_MASK,
            },
            "needs a SequenceDescriptor.from_segment_ids_and_pos",
        ),
        ({"score_mod": abs}, "score_mod of cuDNN"),
        ({"qkv_layout": QKVLayout.BS3HD}, "needs 1 arrays in qkv"),
        ({"bias": Q}, "bias do not agree"),
        ({"qkv_layout": QKVLayout.THD_THD_THD}, "needs a mask with padding"),
        ({"attn_mask_type": AttnMaskType.PADDING_MASK}, "needs a sequence_descriptor"),
        ({"dropout_probability": 0.5}, "needs a seed"),
    ],
)
def test_refusals(words: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        fused_attn((Q, KEY, VALUE), **{**WORDS, **words})


@pytest.mark.parametrize("name", ["causal_padding", "padding_causal"])
def test_names_of_masks_in_either_order(name: str) -> None:
    assert canonicalize_attn_mask_type(name) is AttnMaskType.PADDING_CAUSAL_MASK
    assert canonicalize_attn_mask_type("bottom_right_causal").is_bottom_right()
    assert canonicalize_attn_mask_type("no_mask") is AttnMaskType.NO_MASK
    with pytest.raises(ValueError, match="Use one of no_mask, padding, causal"):
        canonicalize_attn_mask_type("arbitrary")


def test_kernels_serve_16_bits() -> None:
    words = (
        *(QKVLayout.BSHD_BSHD_BSHD, AttnBiasType.POST_SCALE_BIAS, AttnMaskType.PADDING_MASK),
        *(AttnSoftmaxType.VANILLA_SOFTMAX, 0.1, 16, 4, 128, 128, 64, 64, (63, 0)),
    )
    assert is_fused_attn_kernel_available(True, jnp.bfloat16, jnp.bfloat16, *words)
    assert not is_fused_attn_kernel_available(True, jnp.float32, jnp.float32, *words)


def test_orders_of_context_parallel_tokens() -> None:
    tokens = jnp.arange(16)[None]
    swapped = reorder_causal_load_balancing(tokens, ReorderStrategy.DualChunkSwap, 4, 1)
    assert swapped.tolist() == [[0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]]
    striped = reorder_causal_load_balancing(tokens, ReorderStrategy.Striped, 4, 1)
    assert striped.tolist() == [[n for first in range(4) for n in range(first, 16, 4)]]
    for strategy, stripe in ((ReorderStrategy.DualChunkSwap, None), (ReorderStrategy.Striped, 2)):
        there = reorder_causal_load_balancing(tokens, strategy, 4, 1, stripe)
        back = inverse_reorder_causal_load_balancing(there, strategy, 4, 1, stripe)
        assert back.tolist() == tokens.tolist() != there.tolist()
    with pytest.raises(ValueError, match="over 3 ranks cuts multiples of 3"):
        reorder_causal_load_balancing(tokens, ReorderStrategy.Striped, 3, 1)


@pytest.mark.parametrize("strategy", [CPStrategy.RING, CPStrategy.ALL_GATHER])
def test_sequences_over_devices(strategy: CPStrategy) -> None:
    """One array of q, k and v, padding by the numbers of tokens' segments, and an offset."""
    packed = jnp.stack([Q, *[jnp.repeat(x, H // K, 2) for x in (KEY, VALUE)]], axis=2)
    ids, offset = jnp.asarray(SHOWN.astype(np.int32)), random(1, H, 1, 1)
    words = {**WORDS, "attn_mask_type": AttnMaskType.PADDING_CAUSAL_MASK}
    words |= {"qkv_layout": QKVLayout.BS3HD}
    words |= {"softmax_type": AttnSoftmaxType.LEARNABLE_SOFTMAX, "softmax_offset": offset}
    spread = {"context_parallel_axis": "cp", "context_parallel_strategy": strategy}
    del words["sequence_descriptor"]

    def attend(qkv: Any, ids: Any, **more: Any) -> Any:
        described = SequenceDescriptor.from_segment_ids_and_pos(ids, jnp.zeros_like(ids))
        return fused_attn((qkv,), sequence_descriptor=described, **words, **more)

    rows = PartitionSpec(None, "cp")
    run = jax.shard_map(
        lambda qkv, ids: attend(qkv, ids, **spread),
        mesh=Mesh(np.array(jax.devices()[:2]), "cp"),
        in_specs=(rows, rows),
        out_specs=rows,
    )
    close(jax.jit(run)(packed, ids), jax.jit(attend)(packed, ids))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [CPStrategy.RING, CPStrategy.ALL_GATHER])
@pytest.mark.parametrize(
    ("mask", "window"),
    [("padding", (-1, -1)), ("padding_causal", (2, 0)), ("padding_causal_bottom_right", (-1, -1))],
    ids=["padding", "window", "bottom right"],
)
def test_segments_over_devices(strategy: CPStrategy, mask: str, window: tuple[int, int]) -> None:
    """Rows of several segments, whose numbers are traced, in stripes over two devices."""
    queries, keys = IDS, SHORTER if "bottom" in mask else IDS
    ids = tuple(map(jnp.asarray, (queries, keys)))
    spots = tuple(jnp.asarray(_places_in(x)) for x in (queries, keys))
    words = {**WORDS, "attn_mask_type": AttnMaskType(mask), "window_size": window}
    words |= {"qkv_layout": QKVLayout.THD_THD_THD, "max_segments_per_seq": 3}
    words |= {"softmax_type": AttnSoftmaxType.OFF_BY_ONE_SOFTMAX}
    del words["sequence_descriptor"]

    def attend(tensors: Any, ids: Any, places: Any, **more: Any) -> Any:
        described = SequenceDescriptor.from_segment_ids_and_pos(ids, places)
        return fused_attn(tensors, sequence_descriptor=described, **words, **more)

    def spread(tensors: Any, *described: Any) -> Any:
        axis = {"context_parallel_axis": "cp", "context_parallel_strategy": strategy}
        return attend(tensors, *described, **axis, stripe_size=1)

    rows = PartitionSpec(None, "cp")
    mesh = Mesh(np.array(jax.devices()[:2]), "cp")
    run = jax.shard_map(spread, mesh=mesh, in_specs=rows, out_specs=rows)
    order = np.array([*range(0, S, 2), *range(1, S, 2)])

    def results(function: Any, places: Any) -> Any:
        def loss(tensors: Any, *described: Any) -> Any:
            out = function(tensors, *described)
            return (out**2).sum(), out

        given = jax.tree.map(lambda x: x[:, places], ((Q, KEY, VALUE), ids, spots))
        gradients, out = jax.jit(jax.grad(loss, has_aux=True))(*given)
        return [x[:, np.argsort(places)] for x in (out, *gradients)]

    for found, wanted in zip(results(run, order), results(attend, np.arange(S)), strict=True):
        assert np.allclose(found, wanted, atol=1e-5) and wanted.any()


def _places_in(ids: Any) -> Any:
    """The position of each token among those of its segment."""
    same = ids[:, :, None] == ids[:, None, :]
    return np.tril(same).sum(-1, dtype=np.int32) - 1


def test_masks_of_windows() -> None:
    positions = jnp.arange(4)[None]
    seen = make_swa_mask(positions, positions, (1, 0))
    assert seen[0, 0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    ids = jnp.asarray([[1, 1, 0, 0]])
    later = make_swa_mask(positions, positions, (0, 0), bool, ids, ids)
    assert later[0, 0, 0].tolist() == [True, True, True, True]
    assert later[0, 0, 1].tolist() == [False, True, True, True]
