"""Specs of calls: every variant reaches its problem, and nothing is dropped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attngen.errors import SpecError
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import find_violations, resolve
from tests.unit.spec.test_resolve import KNOWN


@pytest.mark.parametrize("slopes", [True, torch.ones(8)], ids=["default", "own"])
def test_from_call_every_variant_reaches_the_problem(slopes) -> None:
    q = SimpleNamespace(shape=(2, 10, 8, 64), dtype="torch.bfloat16")
    spec = AttentionSpec.from_call(
        *(q, q, q), alibi_slopes=slopes, softcap=30.0, softmax="learnable", sink=torch.ones(8),
        return_max_logit=True, window=(3, 4),
    )  # fmt: skip
    (problem,) = resolve(spec, KNOWN)
    assert problem.scores == ("softcap", "alibi"), "the order of the semantics"
    assert (problem.softmax, problem.max_logit, problem.masks) == ("learnable", True, ("window",))


@pytest.mark.parametrize(
    ("kind", "scores"),
    [
        ("post_scale", ("softcap", "post_scale_bias", "alibi")),
        ("pre_scale", ("pre_scale_bias", "softcap", "alibi")),
    ],
)
def test_resolve_bias_stands_where_the_semantics_add_it(kind: str, scores: tuple) -> None:
    spec = AttentionSpec(64, bias=kind, softcap=True, alibi=True, directions=("fwd", "bwd"))
    assert [problem.scores for problem in resolve(spec, KNOWN)] == [scores, scores]
    assert all(problem.bias for problem in resolve(spec, KNOWN))


def test_resolve_bias_beside_8_bit_queries_has_16_bits() -> None:
    both = ("fwd", "bwd")
    spec = AttentionSpec(128, dtype="e4m3", bias="post_scale", directions=both)
    assert all(each.bias and each.dtype_bias == "bf16" for each in resolve(spec, KNOWN))
    for dim, bias, directions, reason in (
        (64, "pre_scale", ("fwd",), "products of stored e4m3.*bias='post_scale'"),
        (64, "pre_scale", ("bwd",), "products of stored e4m3.*bias='none'"),
        (144, "post_scale", both, "up to head dim 128.*got 144.*bias='none'"),
    ):
        with pytest.raises(SpecError, match=f"(?s){reason}"):
            resolve(AttentionSpec(dim, dtype="e4m3", bias=bias, directions=directions), KNOWN)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mask_mod": print},
        {"block_mask": object()},
        {"score_mod": print},
        {"bias": object(), "layout": "paged_kv_bshd_bshd_bshd", "num_splits": 2},
        {"softmax": "smooth", "sink": object()},
    ],
    ids=lambda arguments: "+".join(arguments),
)
def test_from_call_feature_without_kernels_is_never_dropped(arguments: dict) -> None:
    """A feature that a kernel would silently leave out must be refused."""
    q = SimpleNamespace(shape=(2, 10, 8, 64), dtype="torch.bfloat16")
    spec = AttentionSpec.from_call(q, q, q, **arguments)
    assert find_violations(spec, KNOWN)
