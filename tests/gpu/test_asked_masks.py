"""Masks whose bits would take too much memory: kernels ask their programs about pairs of blocks
that these show in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import attngen
from attngen.call.made_mask import asked_parts_of, is_asked
from attngen.fragments.program import MASK_PREFIX
from attngen.frontends.pytorch.callables import bits, listed
from attngen.frontends.pytorch.callables.asked import AskedMaker

from . import gradients, oracle, varlen

pytestmark = pytest.mark.gpu

ROWS, KEYS, HEADS = 150, 210, 4
MaskMod = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def no_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(bits.VARIABLE, "0")
    listed._known.clear()
    yield
    listed._known.clear()


def kinds(device: torch.device) -> MaskMod:
    """Reads tensors of three dtypes, one broadcast over sequences, one from its end."""
    places = torch.arange(KEYS, device=device)
    kind = (places // 37 % 3).expand(2, KEYS)
    open_ = places % 7 == 3
    near = torch.tensor([90.0, 4.5, 33.25, 8.0], device=device).flip(0)

    def mask_mod(b, h, i, j):
        return ((kind[b, i] == kind[b, j]) & ((i - j).abs() < near[-1 - h])) | open_[j - KEYS]

    return mask_mod


def turns(device: torch.device) -> MaskMod:
    """Reads nothing; sequences and heads differ, and the first head of one sees nothing."""
    return lambda b, h, i, j: ((i + 2 * j) % (b + 3) != 0) & (i // 9 >= j // 17 - h) & (b + h > 0)


def islands(device: torch.device) -> MaskMod:
    """Few blocks far from each other, of which some are whole."""
    return lambda b, h, i, j: (i // 64 % 2 == 0) & (j // 64 == (3 * (i // 64) + 1) % 4)


MODS = {each.__name__: each for each in (kinds, turns, islands)}


def check(tensors: tuple[torch.Tensor, ...], mod: MaskMod, **arguments: Any) -> None:
    """Hold outputs and gradients to the definition, of kernels that asked the program."""
    deterministic = arguments.pop("deterministic", False)
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    d_o = oracle.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], dtype=tensors[0].dtype, seed=5)
    with attngen.trace() as seen:
        oracle.check_call(*tensors, mask_mod=mod, **arguments)
        switches = {"deterministic": deterministic, "backend": "cuda"}
        out = attngen.attention(*leaves, mask_mod=mod, **arguments, **switches)
        found = torch.autograd.grad(out, leaves, d_o)
    asked = [each for each, _ in seen.variants if each.direction != "mask"]
    assert asked and all(any(x.startswith(MASK_PREFIX) for x in each.masks) for each in asked)
    gradients.check(found, (*tensors, d_o), None, mask_mod=mod, **arguments)


@pytest.mark.parametrize("name", MODS)
def test_pairs_are_those_of_the_program(name) -> None:
    check(oracle.operands(2, HEADS, 2, ROWS, KEYS, 64), MODS[name](oracle.DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize("d", [40, 128, 192, 256])
@pytest.mark.parametrize("name", MODS)
def test_masks_scores_and_dropout_are_theirs_beside_a_program(name, d) -> None:
    tensors = oracle.operands(2, HEADS, 2, ROWS, KEYS, d)
    mod = MODS[name](oracle.DEVICE)
    check(tensors, mod, mask="causal_bottom_right", deterministic=True)
    check(tensors, mod, window=(40, 60), softcap=4.0, alibi_slopes=True)
    seed = torch.tensor([7, 0], device=oracle.DEVICE)
    check(tensors, mod, dropout_p=0.25, rng_state=seed)


def test_programs_of_a_score_and_of_a_mask_have_tensors_of_their_own(monkeypatch) -> None:
    q, k, v = oracle.operands(2, HEADS, 2, ROWS, KEYS, 64)
    heat = torch.linspace(0.5, 1.5, KEYS, device=oracle.DEVICE).requires_grad_()
    given: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j: s * heat[j] + 0.25 * h,
        "mask_mod": kinds(oracle.DEVICE),
    }

    def results() -> tuple[torch.Tensor, ...]:
        out = attngen.attention(q, k, v, backend="cuda", **given)
        return out, *torch.autograd.grad(out.float().square().sum(), heat)

    with attngen.trace() as seen:
        of_program = results()
    assert any(each.asks_mask and each.direction == "bwd" for each, _ in seen.variants)
    listed._known.clear()
    monkeypatch.delenv(bits.VARIABLE)
    for one, other in zip(of_program, results(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_packed_tokens_count_from_their_sequence() -> None:
    ends = varlen.int32((0, 33, 34, 34, ROWS))
    tensors = tuple(oracle.randn(ROWS, 2, 64, dtype=torch.bfloat16, seed=n) for n in range(3))
    lengths = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    check(tensors, lambda b, h, i, j: (i * 3 + j) % (b + 4) != 1, **lengths)


def test_masks_hold_what_programs_read_when_the_call_was_made() -> None:
    """Later calls find how to make them, and no call sees what tensors hold after it."""
    tensors = oracle.operands(1, 2, 2, ROWS, KEYS, 64)
    kind = torch.arange(KEYS, device=oracle.DEVICE) // 37 % 3

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attngen.attention(
            *leaves, mask_mod=lambda b, h, i, j: (kind[i] == kind[j]) | (j == 0), backend="cuda"
        )
        return out

    first = attend(*tensors)
    assert torch.equal(attend(*tensors), first)
    leaves = [x.clone().requires_grad_() for x in tensors]
    wanted = torch.autograd.grad(attend(*leaves).float().sum(), leaves)
    out = attend(*leaves)
    assert torch.equal(out, first)
    with mock.patch.object(listed, "maker_of") as made_anew:
        kind.remainder_(2)
        changed = attend(*tensors)
    assert not made_anew.called and not torch.equal(changed, first)
    for one, other in zip(torch.autograd.grad(out.float().sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_masks_grow_as_their_maps_and_what_they_read() -> None:
    kind = torch.zeros(256, dtype=torch.int64, device=oracle.DEVICE)
    q = oracle.randn(1, 256, 1, 64, dtype=torch.bfloat16)
    with mock.patch.object(listed, "maker_of", wraps=bits.maker_of) as spy:
        attngen.attention(q, q, q, mask_mod=lambda b, h, i, j: kind[i] == kind[j], backend="cuda")
    made = bits.maker_of(*spy.call_args.args, **spy.call_args.kwargs)
    assert isinstance(made, AskedMaker)
    assert is_asked(torch.empty(made.shape, dtype=torch.int32))
    *planes, words = made.shape
    assert planes == [1, 1, 1]
    assert words < asked_parts_of(256, 256).words + 2 * 256 + 64  # 8 bytes a token, and numbers


def test_what_no_kernel_asks_is_refused_beyond_the_limit() -> None:
    q, k, v = oracle.operands(1, 2, 2, ROWS, KEYS, 64)
    given: dict[str, Any] = {"mask_mod": turns(oracle.DEVICE), "backend": "cuda"}
    shown = torch.ones(ROWS, KEYS, dtype=torch.bool, device=oracle.DEVICE)
    for beside in ({"attn_mask": shown}, {"bias": torch.zeros_like(shown, dtype=q.dtype)}):
        with pytest.raises(attngen.SpecError, match="of bits"):
            attngen.attention(q, k, v, **given, **beside)


def test_masks_without_bits_serve_no_call_that_reads_these() -> None:
    """One call's mask is in use while another's, beside a bias, has the same function."""
    q, k, v = oracle.operands(1, 2, 2, ROWS, KEYS, 64)
    given: dict[str, Any] = {"mask_mod": turns(oracle.DEVICE), "backend": "cuda"}
    bias = torch.zeros(ROWS, KEYS, dtype=q.dtype, device=oracle.DEVICE)
    keeps = attngen.attention(q.clone().requires_grad_(), k, v, **given)
    assert keeps.requires_grad
    with pytest.raises(attngen.SpecError, match="of bits"):
        attngen.attention(q, k, v, **given, bias=bias)


def test_calls_that_are_known_follow_another_limit(monkeypatch) -> None:
    tensors = oracle.operands(1, 2, 2, ROWS, KEYS, 64)
    mod = turns(oracle.DEVICE)

    def asks() -> bool:
        with attngen.trace() as seen:
            attngen.attention(*tensors, mask_mod=mod, backend="cuda")
        return any(each.asks_mask for each, _ in seen.variants)

    assert asks() and asks()
    monkeypatch.delenv(bits.VARIABLE)
    assert not asks()
