"""Parts of attention over an axis of a mesh: what each computes, and how parts add up.

Arrays are [b, t, h, d] here, LSEs [b, h, t]; packed tokens are one batch of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ...call.context.steps import Origin, Part, Span
from ...call.gradient_kernels import wanted_of_operands
from ...call.positions import Positions
from ...call.table import AttentionCall
from . import calls
from .attention import SAVED_AS, run, use_kernels
from .calls import CheckedCall
from .context_storage import DESCALES
from .gradients import check_gradients
from .operation import Form, define
from .program import ordered
from .transforms import operation

Operands = Mapping[str, Array]
Found = dict[str, Array]
WIDE = ("float32", "float64")


@dataclass(frozen=True)
class Words:
    """Arguments of all parts that are no arrays. placed: whether parts say where they stand;
    packed: whether each sequence of the plan is one of the call, or all of a batch are one; stored:
    the dtype of what q, k and v stand for where they have 8 bits."""

    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    bias_type: str = "post_scale"
    deterministic: bool | None = None
    backend: str = "auto"
    placed: bool = False
    packed: bool = False
    stored: str = ""

    @property
    def shared(self) -> dict[str, Any]:
        """The arguments of attention among them."""
        names = ("softmax_scale", "softcap", "dropout_p", "deterministic", "backend")
        return {name: getattr(self, name) for name in names}


class Merged(NamedTuple):
    """Output and LSE of a device's queries once all parts are merged, and their gradients, None
    where nothing depends on the LSE."""

    out: Array
    lse: Array
    d_out: Array
    dlse: Array | None

    def of(self, span: Span) -> Merged:
        """The merged results of some rows."""
        tokens, rows = _tokens(span), _of_heads(span)
        dlse = None if self.dlse is None else self.dlse[rows]
        return Merged(self.out[tokens], self.lse[rows], self.d_out[tokens], dlse)


class State(NamedTuple):
    """Output and LSE of a device's queries over the keys that have come by, in the dtype of
    sums."""

    out: Array
    lse: Array

    @classmethod
    def before(cls, q: Array, v: Array) -> State:
        """No keys yet."""
        batch, tokens, heads, _ = q.shape
        dtype = sums_of(q)
        out = jnp.zeros((batch, tokens, heads, v.shape[-1]), dtype)
        return cls(out, jnp.full((batch, heads, tokens), -jnp.inf, dtype))

    def joined(self, span: Span, out: Array, lse: Array) -> State:
        """With a part of these rows."""
        tokens, rows = _tokens(span), _of_heads(span)
        own, before = self.out[tokens], self.lse[rows]
        out, lse = out.astype(own.dtype), lse.astype(before.dtype)
        whole = jnp.logaddexp(before, lse)
        share = by_row(jnp.where(whole == -jnp.inf, 0, jnp.exp(lse - whole)))
        own = own + (out - own) * share
        if len(span) == self.out.shape[1]:
            return State(own, whole)
        return State(self.out.at[tokens].set(own), self.lse.at[rows].set(whole))


def sums_of(q: Array) -> Any:
    """The dtype in which outputs and gradients are added up."""
    return q.dtype if q.dtype.name in WIDE else jnp.dtype("float32")


def by_row(x: Array) -> Array:
    """Numbers of rows, [b, h, t], as factors of [b, t, h, d]."""
    return x.swapaxes(1, 2)[..., None]


def _tokens(span: Span) -> tuple[slice, slice]:
    return slice(None), slice(*span)


def _of_heads(span: Span) -> tuple[slice, slice, slice]:
    return slice(None), slice(None), slice(*span)


def forward_part(words: Words, part: Part, given: Operands, k: Array, v: Array) -> State:
    """The part's output and LSE. given: the device's operands; k, v: the keys at hand."""
    found = run(_checked(words, part, given, k, v), SAVED_AS, alone=False)
    return State(found["o"], found["lse"])


def _checked(words: Words, part: Part, given: Operands, k: Array, v: Array) -> CheckedCall:
    """A part as a call. Raises: SpecError where it is none that can be computed."""
    q, keys = given["q"], _tokens(part.keys)
    more = _arguments(words, part, given)
    out_dtype = None if q.dtype.name in WIDE else jnp.dtype(words.stored or "float32")
    more |= {name: given[name] for name in DESCALES if name in given}
    return calls.converted(
        AttentionCall(
            q=q[_tokens(part.queries)],  # type: ignore[arg-type]  # arrays of JAX
            k=k[keys],  # type: ignore[arg-type]
            v=v[keys],  # type: ignore[arg-type]
            **words.shared,
            **more,
            out_dtype=out_dtype,  # type: ignore[arg-type]
            return_lse=True,
        )
    )


def _arguments(words: Words, part: Part, given: Operands) -> dict[str, Any]:
    """Arguments of a part that others do not have."""
    found: dict[str, Any] = {}
    left, right = part.window
    own = part.sequence if words.packed else 0
    if words.placed:
        assert part.origin is not None  # the plan was asked for them
        left = -1 if part.left is None else part.left
        right = -1 if part.right is None else part.right
        found["positions"] = Positions(*part.origin, part.delta, 0, own)
    if right == 0:
        found["mask"] = "causal"
    found["window"] = (left, -1 if right == 0 else right)
    slopes = given.get("alibi_slopes")
    if slopes is not None:
        of_one = slopes.ndim == 2 and words.packed
        found["alibi_slopes"] = slopes[own : own + 1] if of_one else slopes
    for name in ("attn_mask", "bias"):
        if name in given:
            found[name] = given[name][_cut(given[name], part)]
    if "bias" in given:
        found["bias_type"] = words.bias_type
    if words.dropout_p > 0:
        found["rng_state"] = given["rng_state"]
    for side, span in (("q", part.queries), ("kv", part.keys)):
        if (used := given.get(f"seqused_{side}")) is not None:
            begin = _begin(part.origin, side)
            found[f"seqused_{side}"] = jnp.clip(used - begin, 0, len(span)).astype(jnp.int32)
    return found


def _begin(origin: Origin | None, side: str) -> int:
    assert origin is not None  # the plan was asked for them
    return origin.query if side == "q" else origin.key


def _cut(x: Array, part: Part) -> tuple[slice, ...]:
    """The part's own of a broadcast of [b, h, t, s], t the device's queries and s all keys."""
    key = _begin(part.origin, "kv")
    rows, columns = slice(*part.queries), slice(key, key + len(part.keys))
    places = (slice(None), slice(None), rows, columns)
    return tuple([slice(None) if n == 1 else s for n, s in zip(x.shape, places, strict=True)])


class Learned(NamedTuple):
    """Sums of gradients: of a device's queries, and of its bias, None where it has none."""

    queries: Array
    bias: Array | None

    def joined(self, part: Part, made: Found) -> Learned:
        """With those that a part makes."""
        tokens = _tokens(part.queries)
        queries, bias = self.queries.at[tokens].add(made["dq"]), self.bias
        if bias is not None:
            own = _cut(bias, part)
            bias = bias.at[own].add(made["dbias"].astype(bias.dtype))
        return Learned(queries, bias)


def backward_part(
    words: Words,
    part: Part,
    given: Operands,
    k: Array,
    v: Array,
    merged: Merged,
    bias_learns: bool,
) -> Found:
    """Gradients of a part's operands by their names, `dq`, `dk`, `dv` and, where it learns,
    `dbias`, in the dtype of sums. Arguments as of `forward_part`, and the merged results."""
    checked = _checked(words, part, given, k, v)
    own = merged.of(part.queries)
    operands = {name: x for name, x in checked.operands.items() if x is not None}
    learned = {"q", "k", "v", *["bias"] * bias_learns}
    operands |= {"d_o": own.d_out, "o": own.out, "lse": own.lse}
    if own.dlse is not None:
        operands["dlse"] = own.dlse
    names = ordered(operands)
    wanted = wanted_of_operands(learned, False)
    form = Form(names, checked.arguments, wanted, False, checked.backend == "cuda", True)
    values = [operands[name] for name in names]
    if use_kernels(checked):
        narrow = form._replace(arguments=checked.arguments._replace(out_dtype=None))
        check_gradients(narrow, values, sorted(learned))
        found = dict(zip(form.results(values), operation(form)(*values), strict=True))
    else:
        found = define(form, values)
    return {name: x.astype(sums_of(given["q"])) for name, x in found.items()}
