"""Lines of ALiBi that leave far keys no weight: blocks that are passed over, or not visited."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import AttentionSpec

from . import oracle, variants

pytestmark = pytest.mark.gpu
KINDS = [
    {},
    {"softcap": 30.0},
    {"softcap": 12.0, "softmax": "off_by_one"},
    {"return_max_logit": True},
    {"softcap": 30.0, "return_max_logit": True},
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KERNELS = [
    AttentionSpec(
        128,
        dtype=dtype,
        mask="causal",
        alibi=True,
        softcap="softcap" in kind,
        softmax=kind.get("softmax", "vanilla"),
        return_max_logit="return_max_logit" in kind,
        directions=("fwd",),
    )
    for kind in KINDS
    for dtype in DTYPES
]
SLOPES = {
    "steep": (8.0, 2.0, 0.7, 0.3),
    "level": (0.25, 0.06, 0.01, 0.0),
    "rising": (-0.5, -0.01, 2.0, -3.0),
}


@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize("lengths", [(1500, 1500), (300, 1700), (1700, 300), (70, 900)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "alone")
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_keys_count_as_much_as_they_weigh(dtype, kind, lengths, slopes):
    """The first keys have scores of some hundreds, which outweigh what lines take from some."""
    made = enumerate((lengths[0], lengths[1], lengths[1]))
    q, k, v = (oracle.randn(1, n, 4, 128, dtype=DTYPES[dtype], seed=i) for i, n in made)
    k[:, : lengths[1] // 8] *= 60
    arguments = {
        "mask": "causal_bottom_right",
        "alibi_slopes": torch.tensor(SLOPES[slopes], device=oracle.DEVICE),
        **{name: x for name, x in kind.items() if name != "return_max_logit"},
    }
    seeks = "return_max_logit" in kind
    out, aux = attngen.attention(
        q, k, v, **arguments, backend="cuda", return_lse=True, return_max_logit=seeks
    )
    oracle.check(out, aux.lse, oracle.truth(q, k, v, **arguments))
    if seeks:
        variants.check_max_logit(aux.max_logit, q, k, v, arguments, False)
