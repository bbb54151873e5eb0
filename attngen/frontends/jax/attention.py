"""`attngen.jax.attention`: one call for every variant, on the kernels or on the definition."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
from jax import Array

from ...call import routing
from ...call.backend import check_backend
from ...call.checks import number_violations
from ...call.operands import softmax_scale_of
from ...call.signatures import argument_list, signature
from ...call.table import ROWS, AttentionCall, make_call
from ...errors import SpecError
from ...results import AttentionAux
from . import callables, calls, reference
from .calls import CheckedCall
from .gradients import CONFIGS_KEPT, Config, differentiable
from .manual_axes import spread, varying
from .operation import Form
from .program import ordered

log = logging.getLogger("attngen")
SAVED_AS = "context"
"""The name of the output and the LSE that a call saves for its gradients, as
TransformerEngine's JAX package has it."""


def attention(
    q: Array, k: Array | None = None, v: Array | None = None, **given: Any
) -> Array | tuple[Array, AttentionAux]:
    """Scaled dot-product attention with any of attngen's masks, scores, softmaxes and layouts.

    The arguments are those of `attngen.attention`, arrays in place of tensors, but for `schedule`,
    `block_mask`, `out` and `out_layout`, which it refuses. A `score_mod` or a `mask_mod` is a
    function of `jax.numpy`: the one becomes part of the kernels, the other booleans. It may be
    called in and under `jax.jit`, `grad`, `vmap`, `checkpoint`, `lax.scan`, `shard_map` and
    shardings. Programs for CUDA run kernels, others the definition; `backend="cuda"` refuses those.
    Gradients flow to q, k, v, bias and sink from the output and the LSE; kernels have no second
    derivatives, and none in forward mode. The output and the LSE that it saves for them are named
    `context` for policies of `jax.checkpoint`.

    `rng_state` is a key of `jax.random`, whose words are the seed; or uint32 [4], the halves of
    seed and offset, the low ones first; or int64 [2]; or a pair of ints. There is no generator
    to draw one from.

    Returns:
        The output in Q's format, with V's head dim and Q's dtype (FP8: out_dtype); or (output,
        AttentionAux) where return_lse, return_max_logit, return_amax or return_rng_state asks for
        by-products.

    Raises:
        SpecError: with every violation at once, while the call is traced.
        CompileError: where a kernel cannot be made, while it is lowered.
        CacheError: where ATTNGEN_DISABLE_JIT is set and no kernel is found.
        BundleError: where a bundle is damaged.

    Args:
    """
    call = make_call("attngen.jax.attention", ROWS, {"q": q, "k": k, "v": v}, given)
    return attend(call, SAVED_AS)


def attend(call: AttentionCall, saved_as: str) -> Array | tuple[Array, AttentionAux]:
    """`attention` of a call that is already a value; saved_as: the name of what it saves.

    Raises: as that.
    """
    call, score_mod = callables.without_functions(call)
    checked = replace(calls.converted(call), score_mod=score_mod)
    found = run(checked, saved_as, alone=not call.wants_aux)
    return as_asked(found, checked, call.wants_aux)


def as_asked(
    found: dict[str, Array], checked: CheckedCall, wants_aux: bool
) -> Array | tuple[Array, AttentionAux]:
    """Results by the operations' names as a call returns them."""
    if not wants_aux:
        return found["o"]
    aux = {name: found.get(name) for name in ("lse", "max_logit", "amax_s", "amax_o")}
    return found["o"], AttentionAux(**aux, rng_state=checked.operands["rng_state"])  # type: ignore[arg-type]  # arrays of JAX


def run(checked: CheckedCall, saved_as: str, alone: bool) -> dict[str, Array]:
    """The results of a call by the operations' names; alone: without the LSE.

    Raises: SpecError where the call names a backend that does not serve it.
    """
    check_backend(checked.backend)
    names = ordered([name for name, x in checked.operands.items() if x is not None])
    operands = [x for name in names if (x := checked.operands[name]) is not None]
    if checked.score_mod is not None:
        form = Form(names, checked.arguments)
        return jax.jit(partial(_define, form, checked.score_mod))(*operands)  # type: ignore[no-any-return]
    if not use_kernels(checked):
        form = Form(names, checked.arguments)
        return _by_definition(form)(*operands)  # type: ignore[no-any-return]
    form = Form(names, checked.arguments, None, alone, checked.backend == "cuda")
    axes = varying(operands)
    made = differentiable(Config(form, saved_as))(*[spread(x, axes) for x in operands])
    return dict(zip(form.results(operands), made, strict=True))


@lru_cache(CONFIGS_KEPT)
def _by_definition(form: Form) -> Any:
    """The definition of a call as a function of its operands."""
    return jax.jit(partial(_define, form, None))


def _define(
    form: Form, score_mod: reference.ScoreMod | None, *operands: Array
) -> dict[str, Array]:
    return reference.forward(form.by_name(operands), form.arguments, score_mod)


def use_kernels(checked: CheckedCall) -> bool:
    """Whether kernels serve a call on CUDA. Raises: SpecError where the call names them, and they
    do not."""
    if checked.backend == "reference":
        return False
    reasons = _refusals(checked)
    if reasons and checked.backend == "cuda":
        raise SpecError(reasons)
    if reasons:
        _log_once("; ".join(reasons))
    return not reasons


def _refusals(checked: CheckedCall) -> list[str]:
    """Why kernels do not serve a call."""
    arguments, given = checked.arguments, checked.descriptions
    q = given["q"]
    assert q is not None  # every call has it
    described = checked.described()
    scale = softmax_scale_of(q, arguments)
    reasons = [*routing.refusals(described), *number_violations(scale, arguments.softcap)]
    return reasons


@lru_cache(CONFIGS_KEPT)  # said once
def _log_once(reason: str) -> None:
    log.warning("attention runs on its definition in jax.numpy: %s", reason)


attention.__doc__ = f"{(attention.__doc__ or '').rstrip()}\n{argument_list(ROWS, indent=8)}\n    "
attention.__signature__ = signature(  # type: ignore[attr-defined]
    ROWS, "Array | tuple[Array, AttentionAux]"
)
