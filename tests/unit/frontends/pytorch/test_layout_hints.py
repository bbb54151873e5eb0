"""A refused call whose shapes would fit another layout is told which."""

import pytest
import torch

import attngen
from attngen import SpecError


def randn(*shape):
    return torch.randn(shape)


B, H, H_KV, S, KEYS, D = 2, 8, 2, 12, 10, 4
Q, K = randn(B, H, S, D), randn(B, H_KV, KEYS, D)  # bhsd

# What is passed, in the default layout where it names none, and the one that fits.
CASES = {
    "heads": ({"q": Q, "k": K, "v": K}, "bhsd"),
    "bias": ({"q": Q, "k": Q, "v": Q, "bias": randn(S, S)}, "bhsd"),
    "mask": ({"q": Q, "k": Q, "v": Q, "attn_mask": randn(S, S) > 0}, "bhsd"),
    "sink": ({"q": Q, "k": Q, "v": Q, "softmax": "learnable", "sink": randn(H)}, "bhsd"),
    "slopes": ({"q": Q, "k": Q, "v": Q, "alibi_slopes": randn(H)}, "bhsd"),
    "bshd for bhsd": (
        {"q": randn(B, S, H, D), "k": randn(B, KEYS, H_KV, D), "layout": "bhsd"} | {
            "v": randn(B, KEYS, H_KV, D)},
        "bshd",
    ),
    "sequence first": (
        {"q": randn(S, B, H, D), "k": randn(KEYS, B, H, D), "v": randn(KEYS, B, H, D)},
        "sbhd",
    ),
    "tokens": (
        {n: randn(S, H, D) for n in "qkv"}
        | {f"cu_seqlens_{n}": torch.tensor([0, 5, S]) for n in ("q", "kv")},
        "thd",
    ),
    "packed": ({"q": randn(B, S, 3, H, D)}, "bs3hd"),
    "packed otherwise": ({"q": randn(B, S, H, 3, D), "layout": "bs3hd"}, "bsh3d"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "cuda", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_refusal_names_the_layout_that_fits(case, backend) -> None:
    given, fitting = CASES[case]
    with pytest.raises(SpecError) as refusal:
        attngen.attention(**given, backend=backend)
    assert len(refusal.value.reasons) >= 2
    assert f"layout={fitting!r}" in "".join(refusal.value.reasons[-2:])
    attngen.attention(**{**given, "layout": fitting}, backend="reference")


@pytest.mark.parametrize(
    "wrong", [{"mask": "x"}, {"softcap": -1.0}, {"bias": randn(3, 5)}], ids="-".join
)
def test_refusal_that_no_layout_helps_names_none(wrong) -> None:
    with pytest.raises(SpecError) as refusal:
        attngen.attention(Q, Q, Q, **wrong)
    assert "layout=" not in str(refusal.value)
