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


LENGTHS = ((130, 1, 65, 200), (200, 70, 65, 129))  # of queries, and of keys


def packed(rows, lengths, gap):
    """The first rows of each sequence of [b, s, …] behind each other, `gap` of none between, NaN in
    scales and the largest numbers in operands; and where they begin."""
    filler = float("nan") if rows.dtype == torch.float32 else 240.0
    none = torch.full_like(rows[0, :gap].float(), filler).to(rows.dtype)
    parts = [x for one, n in zip(rows, lengths, strict=True) for x in (one[:n], none)]
    starts = torch.tensor([0, *(n + gap for n in lengths)], dtype=torch.int32).cumsum(0)
    return torch.cat(parts), starts.to(dtype=torch.int32, device=rows.device)


@pytest.mark.parametrize(
    "d, layout, more",
    [
        (128, "thd", {"mask": "padding_causal"}),
        (64, "thd", {"mask": "padding_causal", "softcap": 20.0}),
        (96, "thd_bshd_bshd", {"mask": "padding", "window": (70, 30)}),
        pytest.param(256, "thd", {"mask": "padding"}, marks=pytest.mark.device),
    ],
)
def test_packed_tokens_are_right(d, layout, more):
    """Each sequence beside its own definition; nothing between sequences counts."""
    lengths, gap = LENGTHS, 3
    rooms = [max(x) for x in lengths]
    (q, k, v), scales = scaled((len(lengths[0]), 2, 1), rooms, d)
    kv_packed = layout == "thd"
    given, call = dict(zip("qkv", (q, k, v), strict=True)), dict(scales)
    for name in "qkv" if kv_packed else "q":
        own = lengths[name != "q"]
        given[name], starts = packed(given[name], own, gap)
        of_rows, _ = packed(scales[f"descale_{name}"].transpose(1, 2), own, gap)
        call[f"descale_{name}"] = of_rows.T[None]
        side = "q" if name == "q" else "kv"
        used = torch.tensor(own, dtype=torch.int32, device=q.device)
        call |= {f"cu_seqlens_{side}": torch.cat([used.new_zeros(1), used.cumsum(0).int()])}
        call |= {f"cu_seqlens_{side}_padded": starts}
    if not kv_packed:
        call["seqused_kv"] = torch.tensor(lengths[1], dtype=torch.int32, device=q.device)
    more = {**more, "softmax_scale": 0.02}
    out, aux = attngen.attention(
        *given.values(), layout=layout, **call, **more, backend="cuda", return_lse=True
    )
    plain = {**more, "mask": {"padding": "none", "padding_causal": "causal"}[more["mask"]]}
    starts = call["cu_seqlens_q_padded"].tolist()
    for b, (s_q, s_kv) in enumerate(zip(*lengths, strict=True)):
        sizes = {"q": s_q, "k": s_kv, "v": s_kv}
        rows = [x[b : b + 1, : sizes[n]] for n, x in zip("qkv", (q, k, v), strict=True)]
        own = {f"descale_{n}": scales[f"descale_{n}"][b : b + 1, :, : sizes[n]] for n in sizes}
        expected = oracle_fp8.truth(*rows, **plain, **own)
        span = slice(starts[b], starts[b] + s_q)
        oracle_fp8.check(out[None, span], aux.lse[None, :, span], expected)


def test_no_suffix_changes_a_bit_of_packed_prefixes():
    """Later tokens of a sequence, and all of others, louder."""
    cuts, lengths = (1, 64, 100, 190), (200, 64, 150, 191)
    quiet, loud = (scaled((4, 1, 1), (200, 200), 64, seed=s) for s in (0, 1))
    far = torch.arange(200) >= torch.tensor(cuts)[:, None]
    outs = []
    for louder in (False, True):
        call, tensors = {}, []
        for i, name in enumerate("qkv"):
            at = far.to(oracle.DEVICE) & louder
            x = torch.where(at[..., None, None], loud[0][i].float(), quiet[0][i].float())
            rows, starts = packed(x.to(quiet[0][i].dtype), lengths, 0)
            tensors.append(rows)
            key = f"descale_{name}"
            s = torch.where(at[:, None], loud[1][key] * 64, quiet[1][key])
            call[key] = packed(s.transpose(1, 2), lengths, 0)[0].T[None]
        call |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        outs.append(
            attngen.attention(
                *tensors, layout="thd", mask="padding_causal", softmax_scale=0.02, **call,
                backend="cuda",
            )
        )  # fmt: skip
    near = torch.cat([~far[b, :n] for b, n in enumerate(lengths)]).to(oracle.DEVICE)
    before, after = outs
    assert torch.equal(before[near], after[near]) and not torch.equal(before, after)
