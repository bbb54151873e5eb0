"""FP8 with a scale a token and head: right, and causal outputs that no suffix changes."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import oracle, oracle_fp8

pytestmark = pytest.mark.gpu
CAUSAL = {"mask": "causal"}


def scaled(heads, lengths, d, d_v=None, layout="bshd", seed=0, **dtypes):
    """q, k and v in 8 bits, and scales between 2^-4 and 2^4 of each token and head."""
    b, h_q, h_kv = heads
    s_q, s_kv = lengths
    q, k, v = oracle_fp8.operands(
        b, h_q, h_kv, s_q, s_kv, d, d_v or d, layout=layout, seed=seed, **dtypes
    )
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (b, h_q, s_q), "k": (b, h_kv, s_kv), "v": (b, h_kv, s_kv)}
    scales = {
        f"descale_{name}": torch.exp2(torch.rand(shape, generator=generator) * 8 - 4)
        for name, shape in shapes.items()
    }
    return (q, k, v), {name: x.to(q.device) for name, x in scales.items()}


CASES = [
    pytest.param(128, None, {**CAUSAL, "softmax_scale": 0.01}, id="128-causal"),
    pytest.param(64, None, {"softmax_scale": 0.01}, id="64-full"),
    pytest.param(256, None, {**CAUSAL, "softmax_scale": 0.01}, id="256-causal"),
    pytest.param(192, 128, {**CAUSAL, "bottom_right": True}, id="192-128-bottom-right"),
    pytest.param(80, 48, {"window": (70, 30), "softmax_scale": 0.02}, id="80-48-window"),
    pytest.param(64, None, {**CAUSAL, "softcap": 20.0, "alibi_slopes": True}, id="softcap-alibi"),
    pytest.param(64, None, {**CAUSAL, "layout": "sbhd_sb2hd"}, id="packed-kv"),
]


@pytest.mark.parametrize("d, d_v, arguments", CASES)
def test_outputs_are_right(d, d_v, arguments):
    layout = arguments.get("layout", "bshd")
    tensors, scales = scaled((1, 2, 1), (150, 290), d, d_v, layout[:4])
    if "_" in layout:  # keys and values in one tensor
        q, k, v = tensors
        pair = torch.stack([k, v], dim=2)
        wanted = attngen.attention(q, k, v, **{**arguments, "layout": layout[:4]}, **scales)
        found = attngen.attention(q, pair, **arguments, **scales, backend="cuda")
        assert torch.equal(found, wanted)
        return
    oracle_fp8.check_call(*tensors, **arguments, **scales)


@pytest.mark.parametrize(
    "d, softmax_scale, given",
    [
        (64, 0.02, False),
        (128, 50.0, True),
        pytest.param(256, 0.02, False, marks=pytest.mark.device),
    ],
)
def test_no_suffix_changes_a_bit_of_a_prefix(d, softmax_scale, given):
    """Sequences alike up to a place of their own each, loud behind it."""
    length, cuts = 200, (1, 64, 100, 190)
    loud, quiet = (scaled((len(cuts), 1, 1), (length, length), d, seed=s) for s in (1, 0))
    far = (
        torch.arange(length, device=oracle.DEVICE)
        >= torch.tensor(cuts, device=oracle.DEVICE)[:, None]
    )
    more = dict(CAUSAL, softmax_scale=softmax_scale, backend="cuda", return_lse=True)
    if given:
        one = torch.ones(1, device=oracle.DEVICE)
        more |= dict(scale_s=one * 448, descale_s=one / 448)
    found = []
    for louder in (False, True):
        tensors, scales = [], {}
        for x, y in zip(loud[0], quiet[0], strict=True):
            alike = y[:1].expand_as(y)
            tensors.append(
                torch.where(far[..., None, None] & louder, x.float(), alike.float()).to(y.dtype)
            )
        for name, y in quiet[1].items():
            scales[name] = torch.where(
                far[:, None] & louder, loud[1][name] * 64, y[:1].expand_as(y)
            )
        found.append(attngen.attention(*tensors, **scales, **more))
    (before, aux_before), (after, aux_after) = found
    near = ~far[..., None, None]
    assert ((before == after) | ~near).all(), "outputs of a prefix"
    assert ((aux_before.lse == aux_after.lse) | far[:, None]).all(), "LSE of a prefix"
    assert ((before != after) & ~near).any(), "what follows counts behind it"


@pytest.mark.device
@pytest.mark.parametrize("mask", ["causal", "causal_bottom_right"])
@pytest.mark.parametrize("d", [64, 128])
def test_no_suffix_changes_a_bit_under_a_recipe(d, mask):
    """A suffix for every place of a sequence, each in a sequence of its own, its values among the
    loudest that 8 bits hold."""
    length = 321
    generator = torch.Generator().manual_seed(2)
    base, loud = torch.randn(2, 3, 1, length, 1, d, generator=generator).to(oracle.DEVICE)
    base[2] *= 0.01
    places = torch.arange(length, device=oracle.DEVICE)
    far = (places >= places[:, None])[..., None, None]
    runs = []
    for factor in (1.0, 900.0):
        tensors = [
            torch.where(far, y * factor, x).bfloat16() for x, y in zip(base, loud, strict=True)
        ]
        recipe = attngen.fp8.Float8CurrentScaling(scaling="token")
        with attngen.fp8.autocast(recipe=recipe), torch.no_grad():
            runs.append(attngen.attention(*tensors, mask=mask, backend="cuda"))
    before, after = runs
    assert ((before == after) | far).all()
    assert not torch.equal(before, after)
