"""Tensors whose storage does not hold their numbers are served by their meaning, or refused."""

import itertools
import logging

import pytest
import torch
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attngen
from attngen import AttentionSpec, SpecError

B, S_Q, S_KV, H, D = 2, 6, 9, 4, 16
VARIANTS = {"causal": causal_upper_left, "causal_bottom_right": causal_lower_right}
BESIDE = {
    "nothing": {},
    "a window": {"window": (2, -1)},
    "ALiBi": {"alibi_slopes": True},
    "lengths": {"seqused_kv": torch.tensor([9, 4], dtype=torch.int32)},
    "a causal mask": {"mask": "causal"},
    "a softcap": {"softcap": 0.5},
    "dropout": {"dropout_p": 0.5, "rng_state": torch.tensor([3, 4])},
}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def operands(dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    shapes = (B, S_Q, H, D), (B, S_KV, H, D), (B, S_KV, H, D)
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes]


def shown_by(mask):
    rows, columns = torch.arange(S_Q)[:, None], torch.arange(S_KV)
    return columns <= rows + (S_KV - S_Q if mask == "causal_bottom_right" else 0)


def output(*tensors, **arguments):
    found = attngen.attention(*tensors, **arguments)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("mask", VARIANTS)
@pytest.mark.parametrize("name", ["bias", "attn_mask"])
def test_causal_bias_is_the_mask_that_it_means(name, mask, beside) -> None:
    tensors, options = operands(), BESIDE[beside]
    wanted = output(*tensors, attn_mask=shown_by(mask), **options)
    found = output(*tensors, **{name: VARIANTS[mask](S_Q, S_KV)}, **options)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mask", VARIANTS)
def test_causal_bias_is_added_to_what_else_hides(mask) -> None:
    tensors, causal = operands(), VARIANTS[mask](S_Q, S_KV)
    given = torch.rand(S_Q, S_KV) > 0.3
    wanted = output(*tensors, attn_mask=given & shown_by(mask))
    assert torch.equal(output(*tensors, attn_mask=given, bias=causal), wanted)
    both = output(*tensors, attn_mask=causal, bias=causal)
    assert torch.allclose(both, output(*tensors, attn_mask=shown_by(mask)))
    bias = torch.randn(S_Q, S_KV)
    wanted = output(*tensors, bias=bias, attn_mask=shown_by(mask))
    assert torch.allclose(output(*tensors, bias=bias, attn_mask=causal), wanted)


@pytest.mark.parametrize("mask", VARIANTS)
@pytest.mark.parametrize("name", ["bias", "attn_mask"])
def test_causal_bias_reaches_kernels_as_a_mask_by_its_name(kernels, name, mask) -> None:
    tensors = operands(torch.bfloat16)
    numbers = torch.zeros(1, S_Q, S_KV).bool() if name == "attn_mask" else torch.zeros(1, S_Q, S_KV)
    for _ in range(2):  # after a tensor of the sizes that this one pretends to have
        attngen.attention(
            *tensors, **{name: numbers.to(torch.bfloat16 if name == "bias" else torch.bool)}
        )
        attngen.attention(*tensors, **{name: VARIANTS[mask](S_Q, S_KV)}, backend="cuda")
        assert kernels.calls[-1][1].mask == mask
    spec = AttentionSpec.from_call(*tensors, **{name: VARIANTS[mask](S_Q, S_KV)})
    assert (spec.mask, spec.attn_mask, spec.bias) == (mask, False, "none")
    window = {name: VARIANTS[mask](S_Q, S_KV), "window": (2, -1)}
    spec = AttentionSpec.from_call(*tensors, **window)
    assert (spec.mask, spec.attn_mask, spec.bias) == ("arbitrary", True, "none")


def test_causal_bias_of_other_sizes_is_refused() -> None:
    with pytest.raises(SpecError, match="attn_mask needs a broadcast.*5, 9"):
        attngen.attention(*operands(), attn_mask=causal_lower_right(5, 9))


def freed():
    held = torch.randn(H)
    held.untyped_storage().resize_(0)
    return held


UNREADABLE = {
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "lazy module"),
    "masked": (lambda: masked_tensor(torch.randn(H), torch.ones(H).bool()), "MaskedTensor"),
    "freed": (freed, "memory was freed"),
    "sparse": (lambda: torch.randn(H).to_sparse(), "to_dense"),
    "CausalBias": (lambda: causal_upper_left(S_Q, S_KV), "CausalBias"),
}
NAMES = (
    *("q", "k", "v", "bias", "attn_mask", "alibi_slopes", "sink", "rng_state", "page_table"),
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("seqused_q", "seqused_kv", "descale_q", "descale_k", "descale_v", "scale_s", "descale_s"),
    "scale_o",
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("backend", ["auto", "cuda", "reference"])
@pytest.mark.parametrize("kind, name", [*itertools.product(UNREADABLE, NAMES)])
def test_tensor_without_numbers_is_refused_by_name(kind, name, backend) -> None:
    make, word = UNREADABLE[kind]
    if kind == "CausalBias" and name in ("bias", "attn_mask"):
        return  # served, above
    given = dict(zip("qkv", operands(), strict=True)) | {name: make()}
    with pytest.raises(SpecError, match=f"(?m)^{name} .*{word}"):
        attngen.attention(**given, backend=backend)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("name", ["q", "sink"])
def test_tensor_without_numbers_is_refused_after_one_with(kernels, name) -> None:
    given = dict(zip("qkv", operands(torch.float16), strict=True))
    given |= {"softmax": "learnable", "sink": torch.randn(H)}
    attngen.attention(**given, backend="cuda")
    masked = masked_tensor(given[name], torch.ones_like(given[name], dtype=torch.bool))
    with pytest.raises(SpecError, match=f"^{name} is a MaskedTensor"):
        attngen.attention(**{**given, name: masked}, backend="cuda")


class Labelled(torch.Tensor):
    """Plain storage under another name."""


@pytest.mark.parametrize("backend", ["reference", "cuda"])
def test_parameters_and_plain_subclasses_are_taken(kernels, backend) -> None:
    q, k, v = operands(torch.bfloat16)
    sink, bias = torch.randn(H), torch.randn(S_Q, S_KV).bfloat16()
    options = {"softmax": "learnable", "backend": backend}
    wanted = attngen.attention(q, k, v, sink=sink, bias=bias, **options)
    given = {"sink": torch.nn.Parameter(sink), "bias": torch.nn.Parameter(bias)}
    assert torch.equal(attngen.attention(q, k, v, **given, **options), wanted)
    labelled = [x.as_subclass(Labelled) for x in (q, k, v)]
    found = attngen.attention(*labelled, sink=sink, bias=bias.as_subclass(Labelled), **options)
    assert torch.equal(found, wanted)
