"""Gradients: the operations as one function of JAX that knows its derivative."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ...call.fragments import LEARNED_SLOT
from ...call.gradient_checks import gradient_violations, no_gradient
from ...call.gradient_kernels import wanted_of_operands
from ...call.table import GRADIENT_OF, INPUTS
from ...call.tensors import is_fp8
from ...errors import SpecError
from .calls import describe
from .operation import Form
from .program import ordered
from .transforms import operation

CONFIGS_KEPT = 4096
# How a call does without gradients that kernels lack.
IN_TORCH = "call under torch.no_grad()"
IN_JAX = "pass operands through jax.lax.stop_gradient, or backend='reference'"
Results = tuple[Array, ...]


class Config(NamedTuple):
    """A differentiable call: its forward, and the name under which what it saves is known to
    policies of `jax.checkpoint`."""

    form: Form
    saved_as: str


@lru_cache(CONFIGS_KEPT)
def differentiable(config: Config) -> Any:
    """The function of the operands of a form, which returns all that the form does."""
    function = jax.custom_vjp(partial(_primal, config))
    function.defvjp(
        partial(_saved, config), partial(_gradients, config), symbolic_zeros=True
    )
    return function


def _primal(config: Config, *operands: Array) -> Results:
    return tuple(operation(config.form)(*operands))


def _saved(config: Config, *operands: Any) -> tuple[Results, Any]:
    """The results, and what their gradients need: the operands, the output, the LSE."""
    form = config.form._replace(alone=False)
    values = [x.value for x in operands]
    learned = [name for name, x in zip(form.names, operands, strict=True) if x.perturbed]
    check_gradients(form, values, learned)
    out, lse, *others = operation(form)(*values)
    out, lse = (checkpoint_name(x, config.saved_as) for x in (out, lse))
    returned = (out, *others) if config.form.alone else (out, lse, *others)
    return returned, (values, out, lse, Names(tuple(learned)))


class Names(NamedTuple):
    """Operands that need their gradients."""

    learned: tuple[str, ...]


jax.tree_util.register_static(Names)


def check_gradients(form: Form, values: list[Array], learned: list[str]) -> None:
    """Raises: SpecError where kernels lack a gradient that is needed."""
    described = form.by_name([describe(n, x) for n, x in zip(form.names, values, strict=True)])
    operands = [described[name] for name in INPUTS]
    reasons = [reason for name in learned if (reason := _no_gradient(name)) is not None]
    if learned and any(x is not None and is_fp8(x) for x in operands[:3]):
        way_out = "pass 16 bits to attngen.jax.fp8_attention"
        reasons.append(f"FP8 operands have no gradients in JAX: {way_out}")
    elif learned:
        found = gradient_violations(operands, form.arguments, "bias" in learned)
        reasons += [x.replace(IN_TORCH, IN_JAX) for x in found]
    if LEARNED_SLOT in learned and form.arguments.deterministic:
        reasons.append(
            "score_mod learns what it captures, whose deterministic gradient is a sum of 64-bit "
            "integers, which JAX's kernels lack: pass deterministic=False, or a bias"
        )
    if reasons:
        raise SpecError(reasons)


def _no_gradient(name: str) -> str | None:
    reason = no_gradient(name)
    return reason and reason.replace("detach it", "pass it through jax.lax.stop_gradient")


def _gradients(config: Config, residuals: Any, cotangents: Any) -> tuple[Array | None, ...]:
    values, out, lse, (learned,) = residuals
    form = config.form
    d_o, *rest = cotangents
    dlse = None
    if not form.alone:
        dlse, *_ = rest
    if isinstance(dlse, SymbolicZero):
        dlse = None
    if isinstance(d_o, SymbolicZero):
        if dlse is None:
            return (None,) * len(values)
        d_o = jnp.zeros(out.shape, out.dtype)
    given = dict(zip(form.names, values, strict=True))
    wanted = wanted_of_operands({*learned}, not {"k", "v"} & {*given})
    given |= {"d_o": d_o.astype(out.dtype), "o": out, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    names = ordered(given)
    backward = form._replace(names=names, wanted=wanted, alone=False)
    made = operation(backward)(*[given[name] for name in names])
    results = backward.results([given[name] for name in names])
    found = dict(zip(results, made, strict=True))
    return tuple([found.get(GRADIENT_OF.get(name, "")) for name in form.names])
