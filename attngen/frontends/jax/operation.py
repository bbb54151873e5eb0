"""The two operations as primitives of JAX: on CUDA a call of the handler, elsewhere the definition.

A lowering for CUDA chooses kernels, and finds or builds them, without a GPU where there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ...call.dropout import keep_scale
from ...call.fp8_checks import BACKWARD_SCALES
from ...call.fragments import LEARNED_SLOT
from ...call.gradient_kernels import GRADIENTS
from ...call.kernel_choice import Device
from ...call.numbers import Arguments
from ...call.operands import output_shapes, unpacked
from ...call.prepare.backward import PreparedBackward
from ...call.prepare.forward import maxima_of
from ...call.prepared import Output, PreparedCall
from ...call.sinks import WorkspaceRows
from ...call.table import GRADIENT_OF, INPUTS, WantedGradients
from ...call.tensors import FP8, TensorDesc
from ...errors import PlanError, SpecError
from ...runtime.load import multiprocessors
from ...runtime.run_time import LOG2_E
from ...spec import layouts
from ...targets.target import DEFAULT, TARGETS, assumed, of_capability
from . import fp8_backward, handler, reference
from .calls import describe
from .places import placed
from .program import COUNTER_BYTES, TARGET, Program, ordered, scratch_of

log = logging.getLogger("attngen")

TYPICAL_MULTIPROCESSORS = 132  # of a chip for which a program is made elsewhere
Arrays = dict[str, "Array | None"]
Results = dict[str, Array]
_OF_BACKWARDS = ("o", "lse", "d_o", "dlse", *BACKWARD_SCALES)


class Form(NamedTuple):
    """An operation but for its operands.

    names: of the operands that there are, in the order of `program.ordered`; wanted: gradients of a
    backward, None of a forward; alone: whether a forward returns no LSE; strict: whether only
    kernels may compute it; joined: whether the output and the LSE of a backward are those of more
    keys than its own, whose part of the gradients it makes.
    """

    names: tuple[str, ...]
    arguments: Arguments
    wanted: WantedGradients | None = None
    alone: bool = False
    strict: bool = False
    joined: bool = False

    def by_name(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Operands by their names, None for those that there are not."""
        given = dict(zip(self.names, operands, strict=True))
        return {**dict.fromkeys((*INPUTS, *_OF_BACKWARDS)), **given}

    def descriptions(self, operands: Sequence[Any]) -> tuple[tuple[str, TensorDesc], ...]:
        """Descriptions of the operands, as kernels know them, with their names."""
        found = [(name, describe(name, x)) for name, x in zip(self.names, operands, strict=True)]
        return tuple((name, x) for name, x in found if x is not None)

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of what it returns, in order."""
        if self.wanted is not None:
            asked = {**self.wanted._asdict(), **dict.fromkeys(("dk", "dv"), self.wanted.dkv)}
            pairs = GRADIENT_OF.items()
            return tuple([made for name, made in pairs if asked[made] and name in self.names])
        found = ["o"] if self.alone else ["o", "lse"]
        found += ["amax_s", "amax_o"] if self.arguments.amax else []
        return (*found, *(["max_logit"] if self.arguments.max_logit else []))

    def results(self, operands: Sequence[Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of what it returns, by name."""
        known = self.by_name([x for _, x in self.descriptions(operands)])
        if self.wanted is not None:
            like = {made: known[name] for name, made in GRADIENT_OF.items()}
            dtypes = {name: self._gradient_dtype(name, like[name]) for name in self.result_names}
            kinds = {name: (like[name].shape, dtype) for name, dtype in dtypes.items()}
        else:
            q, _, v = unpacked(known["q"], known["k"], known["v"], self.arguments.layout)
            out, lse = output_shapes(q, v, self.arguments)
            kinds = {"o": (out, self.arguments.out_dtype or q.dtype), "lse": (lse, "float32")}
            sizes = maxima_of(q, self.arguments).items()
            kinds |= {name: ((size,), "float32") for name, size in sizes}
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            for name, (shape, dtype) in kinds.items()
            if name in self.result_names
        }

    def _gradient_dtype(self, name: str, like: TensorDesc) -> str:
        """The dtype of the gradient of that name of such an operand."""
        wanted = self.arguments.out_dtype
        if like.dtype in FP8:
            return wanted or "bfloat16"
        return "float32" if wanted == "float32" and name in GRADIENTS else like.dtype


attention_p = Primitive("attngen")
attention_p.multiple_results = True


def bind(form: Form, *operands: Array) -> list[Array]:
    """The results of an operation, in the order of `Form.results`; inside a trace."""
    found: list[Array] = attention_p.bind(*operands, form=form)
    return found


def _shapes(*operands: Any, form: Form) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in form.results(operands).values()]


attention_p.def_abstract_eval(_shapes)


def on_reference(*operands: Array, form: Form) -> list[Array]:
    """The operation by its definition. Raises: SpecError where kernels alone may compute it."""
    if form.strict:
        raise SpecError(f"this platform has no kernels; available: {', '.join(TARGETS)}")
    found = define(form, operands)
    return [found[name].astype(x.dtype) for name, x in form.results(operands).items()]


def define(form: Form, operands: Sequence[Array]) -> Results:
    """The results of an operation by its definition, in the dtypes that this has."""
    given = form.by_name(operands)
    call = {name: given[name] for name in INPUTS}
    if form.wanted is None:
        return reference.forward(call, form.arguments)
    if given["q"].dtype.name in FP8:
        return fp8_backward.backward(given, form.arguments)

    def attend(values: Results) -> tuple[Array, Array]:
        results = reference.forward({**call, **values}, form.arguments)
        return results["o"], results["lse"]

    learned = {name: call[name] for name, x in GRADIENT_OF.items() if x in form.result_names}
    (out, lse), back = jax.vjp(attend, learned)
    d_o, dlse = given["d_o"].astype(out.dtype), given["dlse"]
    dlse = jnp.zeros_like(lse) if dlse is None else dlse
    if form.joined:
        d_o, dlse = _own_share(given, out, lse, d_o, dlse)
    (found,) = back((d_o, dlse))
    return {GRADIENT_OF[name]: x for name, x in found.items()}


def _own_share(
    given: Mapping[str, Array], out: Array, lse: Array, d_o: Array, dlse: Array
) -> tuple[Array, Array]:
    """Gradients of a part's output, [b, s, h, d], and LSE, [b, h, s], of those of the joined."""
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - given["lse"]))
    of_lse = (d_o * (out - given["o"])).sum(-1).swapaxes(1, 2) + dlse
    return d_o * share.swapaxes(1, 2)[..., None].astype(d_o.dtype), share * of_lse


def on_kernels(*operands: Array, form: Form) -> list[Array]:
    """The operation by kernels, for a lowering for CUDA; by its definition where the GPU here runs
    none of them, or its architecture has none for the call, or for its gradients, unless this asks
    for kernels.

    Raises: SpecError, CompileError, CacheError.
    """
    device = _planned_device()
    if device.arch is None:
        _say_defined(f"{device.name} runs no architecture's kernels")
        return on_reference(*operands, form=form)
    wants = form.results(operands)
    if form.wanted is not None and fp8_backward.has_16_bits(form.by_name(operands)):
        return _in_16_bits(form, operands)
    described = form.descriptions(operands)
    program = Program(described, form.arguments, form.wanted, form.alone, device.known_arch)
    try:
        prepared = program.prepared(device)
    except (SpecError, PlanError) as error:
        # Which serves the outputs that calls are not refused; a trace says late that these learn.
        if device.arch == DEFAULT.name and form.wanted is None:
            raise
        if form.strict:
            raise SpecError(error.reasons) from error
        _say_defined("; ".join(error.reasons))
        return on_reference(*operands, form=form)
    given = form.by_name(operands)
    if not prepared.launches:
        found = {x.name: _at_rest(x, given, form.arguments) for x in prepared.outputs}
        return _finished(form, prepared, given, found, None, wants)
    program = replace(program, scratch=scratch_of(prepared))
    results = [jax.ShapeDtypeStruct(x.sizes, jnp.dtype(x.dtype)) for x in prepared.outputs]
    if program.scratch:
        results.append(jax.ShapeDtypeStruct((program.scratch // 4,), jnp.dtype("float32")))
    # No kernel reads what stands for others, which nothing need make.
    read = [given["q"] if name == LEARNED_SLOT else given[name] for name in form.names]
    made = jax.ffi.ffi_call(TARGET, results)(*read, program=program.text)
    found = {x.name: value for x, value in zip(prepared.outputs, made, strict=False)}
    *_, scratch = made
    return _finished(form, prepared, given, found, scratch, wants)


def _in_16_bits(form: Form, operands: Sequence[Array]) -> list[Array]:
    """The gradients of an FP8 call by the kernels of 16 bits."""
    given = fp8_backward.widened(form.by_name(operands), form.arguments)
    there = {name: x for name, x in given.items() if x is not None}
    arguments = form.arguments._replace(out_dtype=None, amax=False)
    wide = form._replace(names=ordered(there), arguments=arguments)
    made = on_kernels(*[there[name] for name in wide.names], form=wide)
    kinds = form.results(operands).values()
    return [x.astype(kind.dtype) for x, kind in zip(made, kinds, strict=True)]


@cache  # said once
def _say_defined(why: str) -> None:
    log.warning("attention runs on its definition in jax.numpy: %s", why)


def _planned_device() -> Device:
    """The device that a program is made for: the first one here, else one as are typical."""
    try:
        first, *_ = jax.local_devices(backend="cuda")
    except RuntimeError:
        return Device("cuda", -1, assumed(), planned=TYPICAL_MULTIPROCESSORS)
    major, minor = map(int, first.compute_capability.split("."))
    target, index = of_capability((major, minor)), first.local_hardware_id or 0
    planned = multiprocessors(index) if target else 0
    return Device(str(first), index, target.name if target else None, planned=planned)


def _finished(
    form: Form,
    prepared: PreparedCall | PreparedBackward,
    given: Arrays,
    found: dict[str, Array],
    scratch: Array | None,
    wants: dict[str, jax.ShapeDtypeStruct],
) -> list[Array]:
    """The results of an operation of what its kernels left."""
    if isinstance(prepared, PreparedBackward):
        left = _Results(prepared, given, {**found}, scratch, wants)
        for name in prepared.learned:
            found[name] = _GRADIENTS[name](left)
    return [found[name] for name in wants]


class _Results(NamedTuple):
    """Results of a backward's launches: given, its operands; made, its outputs; scratch, what its
    kernels wrote beside these; wants, what is to be made of them, each by its name."""

    prepared: PreparedBackward
    given: Arrays
    made: dict[str, Array]
    scratch: Array | None
    wants: dict[str, jax.ShapeDtypeStruct]


def _of_sink(left: _Results) -> Array:
    """-Σ exp(sink - LSE) D over sequences and rows, float32 [h_q]; where no query sees a key, each
    LSE is its head's, but for rows of no sequence."""
    prepared, given, scratch = left.prepared, left.given, left.scratch
    sink = given["sink"]
    assert sink is not None  # its gradient is wanted
    if prepared.rows is None or scratch is None:
        dlse, lse = given["dlse"], given["lse"]
        if dlse is None:
            return jnp.zeros_like(sink)
        summed = jnp.where(lse == -jnp.inf, 0, dlse)
        return summed.sum(1 if summed.ndim == 2 else (0, 2))
    lse_log2, d = _rows(prepared.rows, scratch)
    above = jnp.where(lse_log2 == -jnp.inf, jnp.inf, lse_log2)
    weights = jnp.exp2(sink[:, None] * LOG2_E - above)
    dropped = prepared.arguments.dropout_p
    # D is relative to the factor of weights that dropout keeps, which the LSE of 8 bits has.
    unit = fp8_backward.unit_of_weights(given, dropped)
    factor = (keep_scale(dropped) or 1.0) if unit is None else 1 / unit
    return (weights * d).sum((0, 2)) * -factor


def _rows(rows: WorkspaceRows, scratch: Array) -> tuple[Array, Array]:
    """LSE and D as kernels leave them, float32 [batch, heads, rows] each."""
    batch, heads, length = rows.shape
    size = batch * heads * length
    first, second = (
        jax.lax.dynamic_slice(scratch, ((COUNTER_BYTES + offset) // 4,), (size,))
        for offset in (rows.lse_log2, rows.d)
    )
    return first.reshape(rows.shape), second.reshape(rows.shape)


def _of_bias(left: _Results) -> Array:
    """The gradient of a bias, of what its kernel made."""
    dbias, made, wants = left.prepared.dbias, left.made["dbias"], left.wants["dbias"]
    assert dbias is not None  # it is wanted
    if not dbias.sums:
        return made
    return made.sum(dbias.summed, keepdims=True).astype(wants.dtype).reshape(wants.shape)


def _of_learned(left: _Results) -> Array:
    """The gradients of all that a score learns, float32 [n]."""
    return left.made["dlearned"]


_GRADIENTS = {"dsink": _of_sink, "dbias": _of_bias, "dlearned": _of_learned}


def _at_rest(output: Output, given: Arrays, arguments: Arguments) -> Array:
    """A result where nothing is launched."""
    shape, dtype = output.sizes, jnp.dtype(output.dtype)
    if isinstance(output.rest, str):
        per_head = given[output.rest]
        assert per_head is not None  # checked with the call
        made = jnp.broadcast_to(per_head[:, None], shape).astype(dtype)
    else:
        made = jnp.full(shape, output.rest, dtype)
    if output.name != "lse":
        return made
    used = _used(given, arguments)
    return jnp.where(used, made, -jnp.inf)


def _used(given: Arrays, arguments: Arguments) -> Array:
    """Which rows of an LSE belong to a sequence, a broadcast of it."""
    layout = layouts.parse(arguments.layout)
    q, k, v = reference.unpacked(layout, given["q"], given["k"], given["v"])
    used = placed(layout, q, k, v, given).of_q.used
    return used if layout.q_format == "thd" else used[:, None]


def register(platform: str) -> None:
    """Make programs for a platform of XLA's launch kernels, by the handler of that name."""
    mlir.register_lowering(
        attention_p, mlir.lower_fun(on_kernels, multiple_results=True), platform=platform
    )
    handler.register(platform)


mlir.register_lowering(attention_p, mlir.lower_fun(on_reference, multiple_results=True))
register("cuda")
