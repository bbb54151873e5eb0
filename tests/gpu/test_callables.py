"""Callables on kernels: forward and backward, held to the definition."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen

from . import gradients, oracle, varlen

pytestmark = pytest.mark.gpu

HEADS, ROWS, KEYS = 4, 70, 140
FEW = 16  # numbers of a captured tensor
ScoreMod = Callable[..., torch.Tensor]


def relative(device: torch.device) -> ScoreMod:
    """A table by clamped distance and head."""
    table = torch.linspace(-2, 2, 33 * HEADS, device=device).view(33, HEADS).sin()
    return lambda s, b, h, i, j: s + table[(j - i).clamp(-16, 16) + 16, h]


def capped(device: torch.device) -> ScoreMod:
    return lambda s, b, h, i, j: 1.25 * (1.5 * torch.tanh(s / 1.5))


def bent(device: torch.device) -> ScoreMod:
    """A quotient by the score, what a row holds in 16 bits and a key in 64, scores of -inf."""
    heat = torch.linspace(0.5, 1.5, 2 * ROWS, device=device).view(2, ROWS).bfloat16()
    kind = torch.arange(KEYS, device=device) % 5

    def score(s, b, h, i, j):
        return torch.where(kind[j] == 3, -float("inf"), s * heat[b, i] / (1 + 0.1 * s.abs()))

    return score


def waved(device: torch.device) -> ScoreMod:
    """Waves along keys and distances, of many turns."""
    phase = torch.linspace(0, 40, KEYS, device=device)
    return lambda s, b, h, i, j: s * torch.cos(phase[j]) + torch.sin((i - j) * 0.37 + h)


def rooted(device: torch.device) -> ScoreMod:
    """Roots of scores and of distances, that of 0 among them."""
    return lambda s, b, h, i, j: s * torch.rsqrt(1 + s * s) - (i - j).abs().float().sqrt() * 0.1


MODS = {each.__name__: each for each in (relative, capped, bent, waved, rooted)}


def check(
    tensors: tuple[torch.Tensor, ...],
    mod: ScoreMod,
    deterministic: bool = False,
    **arguments: Any,
) -> None:
    q, k, v = tensors
    oracle.check_call(q, k, v, score_mod=mod, **arguments)
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    d_o = oracle.randn(*q.shape, dtype=q.dtype, seed=5)
    switches = {"deterministic": deterministic, "backend": "cuda"}
    out = attngen.attention(*leaves, score_mod=mod, **arguments, **switches)
    found = torch.autograd.grad(out, leaves, d_o)
    gradients.check(found, (q, k, v, d_o), None, score_mod=mod, **arguments)


@pytest.mark.parametrize("name", MODS)
def test_score_mods_are_right(name) -> None:
    masked = {"mask": "causal_bottom_right"} if name == "bent" else {}
    check(oracle.operands(2, HEADS, 2, ROWS, KEYS, 64), MODS[name](oracle.DEVICE), **masked)


@pytest.mark.parametrize("limit", [3.0, 1e-3, 0.0])
def test_multiples_of_scores_over_their_magnitude_are_right(limit) -> None:
    """A number of the launch divides what a score is divided by, were it 0."""
    scale = torch.tensor(limit, device=oracle.DEVICE)
    check(
        oracle.operands(1, 2, 2, ROWS, KEYS, 128),
        lambda s, b, h, i, j: scale * s / (3 + s.abs()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("d", [80, 128, 192])
@pytest.mark.parametrize("name", MODS)
def test_score_mods_beside_masks_scores_and_dropout_are_right(name, d) -> None:
    q, k, v = oracle.operands(2, HEADS, 2, ROWS, KEYS, d)
    bias = oracle.randn(HEADS, ROWS, KEYS, dtype=q.dtype, seed=9)
    mod = MODS[name](oracle.DEVICE)
    check((q, k, v), mod, window=(40, 30), softcap=4.0, alibi_slopes=True)
    check((q, k, v), mod, mask="causal_bottom_right", bias=bias)
    seed = torch.tensor([7, 0], device=oracle.DEVICE)
    check((q, k, v), mod, dropout_p=0.25, rng_state=seed, deterministic=True)


@pytest.mark.parametrize("d", [64, 192])
def test_scores_that_fall_beside_dropout_are_right(d) -> None:
    def turned(s, b, h, i, j):
        return torch.where((i + j) % 2 == 0, s, -s)

    seed = torch.tensor([7, 0], device=oracle.DEVICE)
    check(oracle.operands(1, 2, 1, 40, 70, d), turned, dropout_p=0.25, rng_state=seed)


@pytest.mark.slow
def test_score_mods_of_packed_tokens_count_from_their_sequence() -> None:
    ends = varlen.int32((0, 33, 34, 34, ROWS))
    tensors = tuple(oracle.randn(ROWS, 2, 64, dtype=torch.bfloat16, seed=n) for n in range(3))
    lengths = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    heat = torch.linspace(0.5, 1.5, 4 * ROWS, device=oracle.DEVICE).view(4, ROWS)
    check(tensors, lambda s, b, h, i, j: s * heat[b, i] + heat[b, j] * h, **lengths)


def test_mask_mods_beside_score_mods_and_masks_are_right() -> None:
    document = (torch.arange(KEYS, device=oracle.DEVICE) // 37).expand(2, KEYS)
    shown = torch.arange(KEYS, device=oracle.DEVICE) % 11 != 4

    def mask_mod(b, h, i, j):
        return (document[b, i] == document[b, j]) | (j < 5 + h)

    check(
        oracle.operands(2, HEADS, 2, ROWS, KEYS, 64),
        relative(oracle.DEVICE),
        mask_mod=mask_mod,
        attn_mask=shown,
        window=(90, 40),
    )


@pytest.mark.slow
def test_block_masks_are_right() -> None:
    def mask_mod(b, h, i, j):
        return (i // 30 == j // 30) & (b + h >= 0)

    made = create_block_mask(mask_mod, 2, None, ROWS, KEYS, device=oracle.DEVICE, BLOCK_SIZE=32)
    tensors = oracle.operands(2, HEADS, 2, ROWS, KEYS, 128)
    check(tensors, capped(oracle.DEVICE), block_mask=made)
    oracle.check_call(*tensors, block_mask=made, mask_mod=lambda b, h, i, j: j % 5 != 1)


def with_zeros(x: torch.Tensor) -> torch.Tensor:
    """Numbers of which small ones are 0, with gradients as if they were not."""
    return torch.where(x.abs() < 0.5, x - x.detach(), x)


# Scores that learn what they capture, of such shapes.
LEARNED: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., ScoreMod]]] = {
    "cap": (((),), lambda cap: lambda s, b, h, i, j: (cap + 2) * torch.tanh(s / (cap + 2))),
    "heads and rows": (
        ((HEADS,), (2, ROWS), (KEYS,)),
        lambda slope, row, key: (
            lambda s, b, h, i, j: (
                s * torch.sigmoid(row[b, i]) + slope[h] * (j - i).abs() / KEYS + key[j]
            )
        ),
    ),
    "queries": (
        ((2, HEADS, ROWS),),
        lambda x: (lambda heat: lambda s, b, h, i, j: s * heat[b, h, i] - 0.1 * (i - j).abs())(
            with_zeros(x)
        ),
    ),
    "keys": (
        ((2, HEADS, KEYS), (HEADS,)),
        lambda key, slope: lambda s, b, h, i, j: s + key[b, h, j] * (1 + slope[h]),
    ),
    "distances": (((HEADS, 400),), lambda x: lambda s, b, h, i, j: s + x[h, j - i + 200] * x[h, 0]),
    "table": (
        ((33, HEADS),),
        lambda x: lambda s, b, h, i, j: s + x[(j - i).clamp(-16, 16) + 16, h] * s.abs(),
    ),
    "full": (((HEADS, ROWS, KEYS),), lambda x: lambda s, b, h, i, j: s + x[h, i, j]),
    "temperature": (((HEADS,),), lambda x: lambda s, b, h, i, j: s * x[h]),
}


def learned_gradients(
    tensors: tuple[torch.Tensor, ...],
    make: Callable[..., ScoreMod],
    captures: list[torch.Tensor],
    shift: torch.Tensor | None,
    dtype: torch.dtype,
    **arguments: Any,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output, and gradients of captures, by the reference in a dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, d_o = (x.to(dtype) for x in tensors)
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"].to(dtype)
    leaves = [x.to(wide).requires_grad_() for x in captures]
    out, aux = attngen.reference.attention(q, k, v, score_mod=make(*leaves), **arguments)
    lse = torch.zeros_like(aux.lse) if shift is None else shift.to(aux.lse.dtype)
    seen = torch.where(aux.lse.isfinite(), aux.lse, 0)
    loss = (out * d_o).sum(dtype=wide) + (seen * lse).sum()
    return out.detach(), torch.autograd.grad(loss, leaves)


def check_learned(
    name: str,
    d: int,
    deterministic: bool = False,
    device: torch.device | None = None,
    **arguments: Any,
) -> None:
    """Asserts the float64 rule for gradients of what a score captures. device: where kernels run,
    if not where the definition does."""
    where = device or oracle.DEVICE
    shapes, make = LEARNED[name]
    tensors = oracle.operands(2, HEADS, 2, ROWS, KEYS, d)
    d_o = oracle.randn(*tensors[0].shape, dtype=tensors[0].dtype, seed=5)
    captures = [oracle.randn(*x, dtype=torch.float32, seed=30 + n) for n, x in enumerate(shapes)]
    leaves = [x.clone().to(where).requires_grad_() for x in captures]
    found = []
    there = [x.to(where) for x in tensors]
    for _ in range(1 + deterministic):
        mod = make(*leaves)
        switches = {"deterministic": deterministic, "backend": "cuda"}
        out = attngen.attention(*there, score_mod=mod, **arguments, **switches)
        found.append(torch.autograd.grad(out, leaves, d_o.to(where)))
    if deterministic:
        assert all(map(torch.equal, *found))
    given = (*tensors, d_o)
    exact, expected = learned_gradients(given, make, captures, None, torch.float64, **arguments)
    shift = ((exact - exact.to(out.dtype)) * d_o.double()).sum(-1).transpose(1, 2)
    _, rounded = learned_gradients(given, make, captures, shift, out.dtype, **arguments)
    for own, truth, near in zip(found[0], expected, rounded, strict=True):
        error = oracle.largest((own.to(oracle.DEVICE) - truth).abs())
        largest = oracle.largest(truth.abs())
        # Of few numbers all that rounding adds to the reference may be small by luck: over seeds
        # that of a head's temperature has the size of the kernels', and its largest varies 30-fold.
        share = 2**-9 if own.numel() > FEW else 2**-7
        limit = 4 * oracle.largest((near - truth).abs()) + share * largest
        assert error <= limit, f"{error:.3e} > {limit:.3e}, of {largest:.3e}"


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_captured_tensors_are_right(name) -> None:
    masked = {"mask": "causal_bottom_right"} if name in ("cap", "table") else {}
    repeated = name in ("heads and rows", "queries", "keys", "table")
    check_learned(name, 64, deterministic=repeated, **masked)


@pytest.mark.parametrize(
    ("shape", "end", "mod"),
    [
        ((2, HEADS, 2 * ROWS), ROWS, lambda x, _: lambda s, b, h, i, j: s * x[b, h, i]),
        ((2, HEADS, 2 * KEYS), KEYS, lambda x, y: lambda s, b, h, i, j: s + x[b, h, j] * y[h]),
    ],
    ids=["queries", "keys"],
)
def test_numbers_of_no_query_or_key_are_not_learned_from(shape, end, mod) -> None:
    """Tensors may be captured that reach further, and hold anything there."""
    tensors = oracle.operands(2, HEADS, 2, ROWS, KEYS, 128)
    x, y = (oracle.randn(*each, dtype=torch.float32, seed=7) for each in (shape, (HEADS,)))
    x[..., end:] = torch.nan
    leaves = [each.requires_grad_() for each in (x, y)]
    out = attngen.attention(*tensors, score_mod=mod(*leaves), backend="cuda")
    d_o = oracle.randn(*out.shape, dtype=out.dtype, seed=5)
    found, other = torch.autograd.grad(out, leaves, d_o, allow_unused=True)
    assert found.isfinite().all() and found.any() and not found[..., end:].any()
    assert other is None or other.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("d", [80, 128, 192])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_captured_tensors_beside_masks_scores_and_dropout(name, d) -> None:
    check_learned(name, d, window=(40, 30), softcap=4.0, alibi_slopes=True)
    seed = torch.tensor([7, 0], device=oracle.DEVICE)
    check_learned(name, d, dropout_p=0.25, rng_state=seed, deterministic=True)
    shown = torch.arange(KEYS, device=oracle.DEVICE) % 11 != 4
    check_learned(name, d, attn_mask=shown, mask="causal_bottom_right")


@pytest.mark.parametrize("bias_type", ["pre_scale", "post_scale"])
def test_gradients_of_captured_tensors_beside_a_bias_are_right(bias_type) -> None:
    bias = oracle.randn(HEADS, ROWS, KEYS, dtype=torch.bfloat16, seed=9)
    check_learned("heads and rows", 64, bias=bias, bias_type=bias_type)


@pytest.mark.slow
def test_gradients_of_captured_tensors_of_packed_tokens_are_right() -> None:
    ends = varlen.int32((0, 33, 34, 34, ROWS))
    tensors = tuple(oracle.randn(ROWS, 2, 64, dtype=torch.bfloat16, seed=n) for n in range(4))
    lengths = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    heat = torch.linspace(0.5, 1.5, 4 * ROWS, device=oracle.DEVICE).view(4, ROWS)

    def make(heat: torch.Tensor) -> ScoreMod:
        return lambda s, b, h, i, j: s * heat[b, i] + heat[b, j] * h

    leaf = heat.clone().requires_grad_()
    *operands, d_o = tensors
    out = attngen.attention(*operands, score_mod=make(leaf), **lengths, backend="cuda")
    (found,) = torch.autograd.grad(out, leaf, d_o)
    _, (truth,) = learned_gradients(tensors, make, [heat], None, torch.float64, **lengths)
    assert oracle.largest((found - truth).abs()) <= 2**-7 * oracle.largest(truth.abs())


def test_callables_that_say_what_is_built_in_run_as_it() -> None:
    q, k, v = oracle.operands(2, HEADS, 2, ROWS, KEYS, 64)
    slopes = torch.linspace(0.1, 0.7, HEADS, device=oracle.DEVICE)
    cap = {"score_mod": lambda s, b, h, i, j: 3 * torch.tanh(s / 3)}
    off = {"score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()}
    near = {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 40)}
    ends = torch.tensor([9, 50], dtype=torch.int32, device=oracle.DEVICE)
    prefix = {"mask_mod": lambda b, h, i, j: (j < ends[b]) | (j <= i)}
    own_prefix = {"mask": "prefix", "prefix": ends}
    for given, own in ((cap | near, {"softcap": 3.0, "mask": "causal", "window": (39, 0)}),
                       (off | prefix, {"alibi_slopes": slopes, **own_prefix})):  # fmt: skip
        found = []
        with attngen.trace() as seen:
            for each in (given, own):
                found.append(attngen.attention(q, k, v, **each, backend="cuda"))
        assert torch.equal(*found) and len(seen.variants) == 1


def test_few_queries_have_score_mods_that_ask_for_their_head() -> None:
    heat = torch.linspace(-1, 1, HEADS, device=oracle.DEVICE)
    q, k, v = oracle.operands(1, HEADS, 1, 2, KEYS, 64)
    oracle.check_call(q, k, v, score_mod=lambda s, b, h, i, j: s + heat[h] * (i + 1) * (j % 3))


def test_new_closures_numbers_and_sizes_are_one_kernel() -> None:
    def make(cap: float, table: torch.Tensor) -> ScoreMod:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap) + table[i]

    found = []
    with attngen.trace() as seen:
        for cap, rows in ((2.0, 20), (3.0, 20), (3.0, 33)):
            q, k, v = oracle.operands(1, 2, 2, rows, rows, 64)
            table = torch.linspace(0, 1, rows, device=oracle.DEVICE)
            mod = make(cap, table)
            found.append(attngen.attention(q, k, v, score_mod=mod, backend="cuda"))
            oracle.check(found[-1], None, oracle.truth(q, k, v, score_mod=mod))
    assert len(seen.variants) == 1


def test_what_kernels_lack_goes_to_the_reference_and_says_why(caplog) -> None:
    q, k, v = oracle.operands(1, 2, 2, 20, 20, 64)
    kinds = [torch.ones(2, device=oracle.DEVICE, requires_grad=True) for _ in range(5)]

    def mod(s, b, h, i, j):
        return s + sum(kind[h] * (i - j) ** n for n, kind in enumerate(kinds))

    with pytest.raises(attngen.SpecError, match="score_mod reads 5 captured tensors"):
        attngen.attention(q, k, v, score_mod=mod, backend="cuda")
    with caplog.at_level(logging.WARNING, logger="attngen"):
        out = attngen.attention(q, k, v, score_mod=mod)
    assert "score_mod reads 5 captured tensors" in caplog.text
    found = torch.autograd.grad(out.float().sum(), kinds)
    assert all(x.shape == kind.shape for x, kind in zip(found, kinds, strict=True))
