"""`attngen.jax.fp8_attention`: 16-bit operands whose attention runs in FP8, with gradients."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ...call import routing
from ...call.dropout import keep_scale
from ...call.fp8_scales import DS_BOUND
from ...call.gradient_checks import gradient_violations, no_gradient
from ...call.gradient_kernels import wanted_of_operands
from ...call.operands import softmax_scale_of
from ...call.table import CARRIERS, GRADIENT_OF, INPUTS, LEARNED, ROWS, SCALES, make_call
from ...call.table import AttentionCall as Call
from ...call.table import named as named_arguments
from ...call.tensors import TensorDesc
from ...errors import SpecError
from ...results import AttentionAux
from ...spec import layouts
from ...spec.layouts import axes_of
from . import calls, checks
from .attention import SAVED_AS, as_asked, use_kernels
from .calls import CheckedCall, describe
from .fp8 import by_heads, largest, largest_of, power_of_two_below, quantised, read, scaled
from .fp8_backward import backward
from .fp8_recipes import DelayedScaling, Float8CurrentScaling, Float8Scales, Recipe, check_scales
from .gradients import CONFIGS_KEPT, Names
from .manual_axes import spread, varying
from .operation import Form
from .places import used_rows
from .program import ordered
from .reference import forward
from .transforms import operation

SIXTEEN_BITS = ("float16", "bfloat16")
Results = dict[str, Array]


def fp8_attention(
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    recipe: Recipe | None = None,
    scales: Float8Scales | None = None,
    **given: Any,
) -> Array | tuple[Array | AttentionAux | Float8Scales, ...]:
    """Attention of q, k and v in 16 bits that runs in FP8: they are stored by scales of their own.

    Gradients, in 16 bits, pass the rounding to 8 straight through. The other arguments, results and
    transformations are those of `attngen.jax.attention`, but for pages, scales and `out_dtype` in
    8 bits. recipe: how they are stored, `Float8CurrentScaling()` by default. scales: the state of a
    `DelayedScaling`, which comes back behind the other results with this call's magnitudes noted;
    its gradient holds those of a backward in 8 bits, for `Float8Scales.with_gradients`.

    Raises: SpecError with every violation at once, while the call is traced; CompileError where a
    kernel cannot be made, CacheError where none is found, while it is lowered.
    """
    recipe = Float8CurrentScaling() if recipe is None else recipe
    call = make_call("attngen.jax.fp8_attention", ROWS, {"q": q, "k": k, "v": v}, given)
    _refuse(call, recipe)
    check_scales(recipe, scales)
    calls.checked(call)  # before scales are made of what it gives
    wide = {name: jnp.asarray(x) for name in CARRIERS if (x := getattr(call, name)) is not None}
    known = None if scales is None else jax.lax.stop_gradient(scales.scale)
    checked, amax, amax_v = _stored(call, wide, recipe, known)
    kernels = use_kernels(checked)
    form8 = _stores_gradients(checked, recipe, kernels)
    names = ordered([name for name, x in checked.operands.items() if x is not None])
    form = Form(names, checked.arguments, None, not call.wants_aux, checked.backend == "cuda")
    config = _Config(form, recipe, kernels, form8)
    operands = [x for name in names if (x := checked.operands[name]) is not None]
    history = [] if scales is None else [scales.gradient_scale, scales.gradient_history]
    axes = varying([*wide.values(), *operands])
    wide = {name: spread(x, axes) for name, x in wide.items()}
    operands, amax_v = [spread(x, axes) for x in operands], spread(amax_v, axes)
    found: Results = _differentiable(config)(wide, operands, amax_v, history)
    made = as_asked(found, checked, call.wants_aux)
    if scales is None:
        return made
    return (*(made if isinstance(made, tuple) else (made,)), scales.noted(amax))


def _refuse(call: Call, recipe: object) -> None:
    """Raises: SpecError with each reason why a call cannot be one in FP8."""
    reasons = []
    if not isinstance(recipe, (Float8CurrentScaling, DelayedScaling)):
        reasons.append(f"recipe needs one of attngen.jax, as Float8CurrentScaling; got {recipe!r}")
    for name in CARRIERS:
        x = getattr(call, name)
        if x is None and name != "q":
            continue
        if not checks.is_array(x):
            reasons.append(f"{name} needs an array; got {type(x).__name__}. Pass a jax.Array.")
        elif x.dtype.name not in SIXTEEN_BITS:
            reasons.append(f"{name} needs float16 or bfloat16; got {x.dtype.name}. Cast it.")
    reasons += [
        f"{name} is the recipe's to choose. Leave it out, or call attngen.jax.attention."
        for name in SCALES
        if getattr(call, name) is not None
    ]
    if call.page_table is not None:
        reasons.append("pages are kept in FP8 by attngen.jax.attention. Call that.")
    if call.out_dtype is not None and _name_of(call.out_dtype) not in SIXTEEN_BITS:
        reasons.append(f"out_dtype needs float16 or bfloat16; got {call.out_dtype!r}")
    if reasons:
        raise SpecError(reasons)


def _name_of(dtype: Any) -> str:
    """The name of a dtype; none of what is no dtype."""
    try:
        return str(jnp.dtype(dtype).name)
    except TypeError:
        return ""


class _Stored(NamedTuple):
    """The FP8 call that stands for one in 16 bits. amax: of q, k and v, [3], of which those of an
    array of several are one; amax_v: the largest magnitude of V as stored."""

    checked: CheckedCall
    amax: Array
    amax_v: Array


def _stored(
    call: Call, wide: dict[str, Array], recipe: Recipe, known: Array | None
) -> _Stored:
    """Store a call's arrays. known: scales of q, k and v that histories say, 0 of those that have
    none yet; None where their own magnitudes do."""
    if recipe.by_token:
        return _stored_by_token(call, wide, recipe)
    dtype, _ = recipe.dtypes
    layout = layouts.parse(call.layout)
    lengths = calls.lengths_of(call)
    changed: dict[str, Any] = {"out_dtype": call.out_dtype or wide["q"].dtype}
    stored_amax, found = {}, []
    for place, (name, x) in enumerate(wide.items()):
        x = jax.lax.stop_gradient(x)
        side = "q" if name == "q" else "kv"
        amax = largest(x, used_rows(axes_of(layout, name), side, x.shape, lengths))
        scale = recipe.scale(amax, dtype)
        if known is not None:
            own = known[place : place + 1]
            scale = jnp.where(own > 0, own, scale)
        found.append(amax)
        changed[name], changed[f"descale_{name}"] = scaled(x, dtype, scale), 1 / scale
        stored_amax[name] = read(quantised(amax * scale, dtype)) / scale
    for name in CARRIERS:
        carrier, _, _ = layout.home(name)
        changed[f"descale_{name}"] = changed[f"descale_{carrier}"]
    carrier, _, _ = layout.home("v")
    checked = calls.converted(Call(**{**named_arguments(call), **changed}))
    *_, last = found
    maxima = jnp.concatenate([*found, *[last] * (len(CARRIERS) - len(found))])
    return _Stored(checked, maxima, stored_amax[carrier])


def _stored_by_token(call: Call, wide: dict[str, Array], recipe: Recipe) -> _Stored:
    """Store a call's arrays with a scale of each row: nothing that other rows hold changes it."""
    dtype, _ = recipe.dtypes
    changed: dict[str, Any] = {"out_dtype": call.out_dtype or wide["q"].dtype}
    rows = {}
    for name, x in wide.items():
        x = jax.lax.stop_gradient(x)
        scale = recipe.scale(jnp.max(jnp.abs(x), axis=-1, initial=0).astype(jnp.float32), dtype)
        changed[name], rows[name] = scaled(x, dtype, scale[..., None]), 1 / scale
    changed |= by_heads(rows, layouts.parse(call.layout))
    checked = calls.converted(Call(**{**named_arguments(call), **changed}))
    # No history notes magnitudes, and no backward asks for V's.
    return _Stored(checked, jnp.zeros(len(CARRIERS), jnp.float32), jnp.zeros(1, jnp.float32))


def _stores_gradients(checked: CheckedCall, recipe: Recipe, kernels: bool) -> bool:
    """Whether the backward is in 8 bits. Raises: SpecError where the recipe wants it, and kernels
    that serve the call have none."""
    if recipe.backward == "16" or recipe.by_token:
        return False
    _, dtype = recipe.dtypes
    reasons = routing.backward_refusals(checked.described(), dtype) if kernels else []
    if reasons and recipe.backward == "fp8":
        way_out = "Take a recipe with backward='fp8_or_16' or '16', or backend='reference'."
        raise SpecError([f"{reason}. {way_out}" for reason in reasons])
    return not reasons


class _Config(NamedTuple):
    """A call but for its arrays: its FP8 forward, whether kernels serve it, and whether its
    backward is in 8 bits."""

    form: Form
    recipe: Recipe
    kernels: bool
    in_8_bits: bool

    def run(self, form: Form, operands: list[Array]) -> Results:
        """The results of one of its operations by their names."""
        names = form.results(operands)
        if self.kernels:
            return dict(zip(names, operation(form)(*operands), strict=True))
        given = form.by_name(operands)
        compute = forward if form.wanted is None else backward
        made = compute(given, form.arguments)
        return {name: made[name].astype(x.dtype) for name, x in names.items()}


@lru_cache(CONFIGS_KEPT)
def _differentiable(config: _Config) -> Any:
    """The function of 16-bit carriers, which get gradients, of the operands of the FP8 call, of the
    largest magnitude of V, and of the scale and the history of dO where a state has them."""
    function = jax.custom_vjp(
        lambda wide, operands, amax_v, history: config.run(config.form, operands)
    )
    function.defvjp(partial(_saved, config), partial(_gradients, config), symbolic_zeros=True)
    return function


def _saved(
    config: _Config, wide: Any, operands: Any, amax_v: Any, history: Any
) -> tuple[Results, Any]:
    """The results, and what their gradients need."""
    form = config.form._replace(alone=False)
    values = _once({name: x.value for name, x in wide.items()}, [x.value for x in operands])
    pairs = zip(form.names, operands, strict=True)
    learned = [name for name, x in pairs if x.perturbed and name not in CARRIERS]
    learned += [name for name, x in wide.items() if x.perturbed]
    _check_gradients(form, values, learned)
    found = config.run(form, values)
    out, lse = (checkpoint_name(found[name], SAVED_AS) for name in ("o", "lse"))
    results = {**found, "o": out, "lse": lse}
    returned = {name: x for name, x in results.items() if name != "lse" or not config.form.alone}
    shapes = {name: jnp.zeros((0,), x.value.dtype) for name, x in wide.items()}
    kept = [x.value for x in history]
    return returned, (values, shapes, (amax_v.value, kept), out, lse, Names(tuple(learned)))


@jax.custom_jvp
def _once(wide: Results, operands: list[Array]) -> list[Array]:
    """The operands of a call that has gradients: of these nobody takes derivatives, which would be
    0, since numbers in 8 bits are no function of the carriers to JAX."""
    return operands


@_once.defjvp
def _refuse_second_derivatives(*_: Any) -> Any:
    raise SpecError(
        "FP8 calls have no second derivative, and gradients none in forward mode; call "
        "attngen.jax.attention with backend='reference'"
    )


def _check_gradients(form: Form, values: list[Array], learned: list[str]) -> None:
    """Raises: SpecError where a gradient is needed that there is not."""
    reasons = [reason for name in learned if (reason := no_gradient(name)) is not None]
    if learned and not reasons:
        described = form.by_name([describe(n, x) for n, x in zip(form.names, values, strict=True)])
        dtype = form.arguments.out_dtype or "bfloat16"
        wide = {
            name: None if x is None else TensorDesc.contiguous(x.shape, dtype)
            for name, x in ((name, described[name]) for name in CARRIERS)
        }
        operands = [{**described, **wide}[name] for name in INPUTS]
        reasons += gradient_violations(operands, form.arguments, "bias" in learned)
    if reasons:
        raise SpecError(
            [x.replace("detach it", "pass it through jax.lax.stop_gradient") for x in reasons]
        )


def _gradients(config: _Config, residuals: Any, cotangents: Results) -> tuple[Any, ...]:
    values, like, (amax_v, history), out, lse, (learned,) = residuals
    form = config.form
    d_o, dlse = cotangents["o"], cotangents.get("lse")
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    noticed: list[Array | None] = [None] * len(history)
    nothing = None, [None] * len(values), None, noticed
    if isinstance(d_o, SymbolicZero):
        if dlse is None:
            return nothing
        d_o = jnp.zeros(out.shape, out.dtype)
    if not learned:
        return nothing
    given = dict(zip(form.names, values, strict=True))
    wanted = wanted_of_operands({*learned}, not {"k", "v"} & {*given})
    given |= {"d_o": d_o.astype(out.dtype), "o": out, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    if config.in_8_bits:
        amax, stored = _in_8_bits(config, given, amax_v, history)
        given |= stored
        if history:
            scale, rows = history
            apart = {*varying([amax])} - {*varying([rows])}  # of devices that share a history
            amax = jax.lax.pmax(amax, tuple(sorted(apart))) if apart else amax
            noticed = [jnp.zeros_like(scale), jnp.zeros_like(rows).at[:1].set(amax)]
    names = ordered(given)
    arguments = form.arguments._replace(amax=False)
    made = form._replace(names=names, arguments=arguments, wanted=wanted, alone=False)
    found = config.run(made, [given[name] for name in names])
    wide = {
        name: found[GRADIENT_OF[name]].astype(x.dtype) if GRADIENT_OF[name] in found else None
        for name, x in like.items()
    }
    of_learned = [
        found.get(GRADIENT_OF[name]) if name in LEARNED else None for name in form.names
    ]
    return wide, of_learned, None, noticed


def _in_8_bits(
    config: _Config, given: dict[str, Array], amax_v: Array, history: list[Array]
) -> tuple[Array, dict[str, Array]]:
    """The largest magnitude of dO, [1]; dO in 8 bits, and the scales of a backward: dO's by its
    history or that magnitude, dS's by a bound."""
    arguments, recipe = config.form.arguments, config.recipe
    layout = layouts.parse(arguments.layout)
    _, dtype = recipe.dtypes
    d_o, dlse, q = given["d_o"], given.get("dlse"), given["q"]
    lengths = {name: given.get(name) for name in INPUTS}
    rows = used_rows([*layout.q_format], "q", d_o.shape, lengths)
    amax = largest(d_o, rows)
    scale = recipe.scale(amax, dtype)
    if history:
        known, _ = history
        scale = jnp.where(known > 0, known, scale)
    keep = keep_scale(arguments.dropout_p) if arguments.dropout_p > 0 else 1.0
    bound = amax * amax_v * (DS_BOUND * d_o.shape[-1] * keep)
    if dlse is not None:
        bound = bound + largest(jnp.where(given["lse"] == -jnp.inf, 0, dlse), None)
    of_softmax = abs(softmax_scale_of(describe("q", q), arguments))  # type: ignore[arg-type]  # it is one
    scale_dp = power_of_two_below(largest_of(dtype) / (bound * of_softmax))
    return amax, {
        "d_o": scaled(d_o, dtype, scale),
        "descale_do": 1 / scale,
        "scale_dp": scale_dp,
        "descale_dp": 1 / scale_dp,
    }
