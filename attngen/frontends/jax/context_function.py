"""Attention over an axis of a mesh as a function of JAX that knows its derivative.

Every device runs one program: it looks up which parts it computes at a visit, and what it sends.
Keys travel from who holds them to who needs them, and their gradients back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ...call.context.order import Order
from ...call.context.visits import Parts, Visit
from ...call.table import CARRIERS
from .context_parts import (
    Learned,
    Merged,
    Operands,
    State,
    Words,
    backward_part,
    by_row,
    forward_part,
    sums_of,
)
from .context_storage import DESCALES, SCALES, maxima_of, numbers_of, stored, widened
from .fp8_recipes import Recipe
from .gradients import CONFIGS_KEPT, Names
from .manual_axes import spread, varying

Results = tuple[Array, Array]
Gradients = dict[str, "Array | None"]


@dataclass(frozen=True)
class Config:
    """A call over an axis but for its arrays.

    visits: of all devices. gathers: whether they are one, of gathered keys; order, rooms: by which
    devices hold the keys of each packed sequence, or of all of a batch alike. unused, unused_kv: of
    each device, the tokens of its queries, and keys, that belong to no sequence. travels: the dtype
    of gradients in messages, beside operands of 16 bits. recipe: by which q, k and v are stored in
    8 bits, None where they are not.
    """

    axis: str
    order: Order
    rooms: tuple[int, ...]
    visits: tuple[Visit, ...]
    gathers: bool
    unused: tuple[tuple[int, ...], ...]
    unused_kv: tuple[tuple[int, ...], ...]
    words: Words
    travels: str
    saved_as: str
    recipe: Recipe | None = None

    @property
    def rank(self) -> Array:
        """The device's number on the axis."""
        return jax.lax.axis_index(self.axis)

    def at_hand(self, visit: Visit, x: Array) -> Array:
        """Keys or values of a visit, of the device's own and those of others."""
        if self.gathers:
            whole: Array = jax.lax.all_gather(x, self.axis, axis=1, tiled=True)
            places = self.order.unshard(self.rooms)
            in_order = places == [*range(len(places))]
            return whole if in_order else jnp.take(whole, np.array(places), axis=1)
        if not visit.pairs:
            return x
        if visit.rows is not None:
            x = jnp.take(x, self._rows(visit.rows), axis=1, mode="clip")
        moved: Array = jax.lax.ppermute(x, self.axis, visit.pairs)
        return moved

    def returned(self, visit: Visit, x: Array, total: Array) -> Array:
        """Sums of gradients of the device's keys, with those that a visit made of keys at hand."""
        if self.gathers:
            return total + self._scattered(x).astype(total.dtype)
        if not visit.pairs:
            return total + x
        back = [(reader, source) for source, reader in visit.pairs]
        own = jax.lax.ppermute(x.astype(self._travels(x)), self.axis, back).astype(total.dtype)
        if visit.rows is None:
            whole: Array = total + own
            return whole
        rows = self._rows(visit.rows)
        added: Array = total.at[:, rows].add(own, mode="drop", unique_indices=True)
        return added

    def _scattered(self, x: Array) -> Array:
        """Gradients of all keys, added up where they are held, in the order of devices."""
        ranks = range(self.order.ranks)
        places = np.array([self.order.shard(rank, self.rooms) for rank in ranks])
        sent = jnp.take(x.astype(self._travels(x)), places, axis=1)
        found: Array = jax.lax.all_to_all(sent, self.axis, split_axis=1, concat_axis=1, tiled=True)
        return found.astype(x.dtype).sum(1)

    def _travels(self, x: Array) -> Any:
        return x.dtype if x.dtype.name == "float64" else jnp.dtype(self.travels)

    def _rows(self, rows: tuple[tuple[int, ...], ...]) -> Array:
        return jnp.asarray(np.array(rows, np.int32))[self.rank]

    def chosen(self, visit: Visit, run: Callable[[Parts, Any], Any], state: Any) -> Any:
        """Run a device's own branch on a state. run: of parts and a state."""
        axes = varying(jax.tree.leaves(state))
        branches = [partial(_spread_tree, axes, partial(run, parts)) for parts in visit.branches]
        if len(branches) == 1:
            return branches.pop()(state)
        which = jnp.asarray(np.array(visit.which, np.int32))[self.rank]
        return jax.lax.switch(which, branches, state)

    def used(self, given: Operands, name: str = "q") -> Array | None:
        """Which queries, or keys, belong to a sequence, bool [1 or b, 1, t]; None where all do."""
        tokens, unused = given[name].shape[1], self.unused if name == "q" else self.unused_kv
        found = None
        if any(unused):
            table = np.ones((self.order.ranks, 1, 1, tokens), bool)
            for rank, places in enumerate(unused):
                table[rank, ..., list(places)] = False
            found = jnp.asarray(table)[self.rank]
        if (lengths := given.get("seqused_q" if name == "q" else "seqused_kv")) is not None:
            rooms = [tokens * self.order.ranks]
            held = [self.order.positions(rank, rooms) for rank in range(self.order.ranks)]
            found = jnp.asarray(np.array(held, np.int32))[self.rank] < lengths[:, None, None]
        return found

    def maxima(self, given: Operands) -> Array:
        """The largest magnitudes of q, k and v on all devices, float32 [3]."""
        rows = {name: self.used(given, name) for name in CARRIERS}
        used = {n: None if x is None else x.swapaxes(1, 2)[..., None] for n, x in rows.items()}
        return maxima_of(self.axis, given, used)

    def stored(self, given: Operands) -> Operands:
        """The operands as parts read them."""
        return given if self.recipe is None else stored(self.recipe, given)

    def widened(self, given: Operands, name: str, x: Array) -> Array:
        """Numbers that a stored carrier of that name stands for; another one itself."""
        if self.recipe is None:
            return x
        return widened(self.recipe, given, name, x, self.words.stored)


def _spread_tree(axes: tuple[str, ...], run: Callable[[Any], Any], state: Any) -> Any:
    """Results that may differ along these axes, as those of every branch."""
    return jax.tree.map(lambda x: spread(x, axes), run(state))


@lru_cache(CONFIGS_KEPT)
def differentiable(config: Config) -> Any:
    """The function of a call's operands by their names: output and LSE of the device's queries,
    [b, t, h, d_v] and [b, h, t]."""
    function = jax.custom_vjp(partial(_attend, config))
    function.defvjp(partial(_saved, config), partial(_gradients, config), symbolic_zeros=True)
    return function


def _attend(config: Config, given: Operands) -> Results:
    return _attend_stored(config, config.stored(given), given["q"].dtype)


def _attend_stored(config: Config, given: Operands, dtype: Any) -> Results:
    """Output, in that dtype, and LSE. given: the operands as parts read them."""
    state = State.before(given["q"], given["v"])
    state = State(*[spread(x, varying([*given.values()])) for x in state])
    read = {**given, "q": numbers_of(config.recipe, given["q"])}
    for visit in config.visits:
        k, v = (numbers_of(config.recipe, config.at_hand(visit, given[name])) for name in "kv")
        run = partial(_joined, config.words, read, k, v)
        state = config.chosen(visit, run, state)
    out, lse = state
    if (sink := given.get("sink")) is not None:
        out, lse = _with_sink(sink.astype(lse.dtype), out, lse, config.used(given))
    return out.astype(dtype), lse


def _joined(words: Words, given: Operands, k: Array, v: Array, parts: Parts, state: State) -> State:
    for part in parts:
        state = state.joined(part.queries, *forward_part(words, part, given, k, v))
    return state


def _with_sink(sink: Array, out: Array, lse: Array, used: Array | None) -> Results:
    """Output and LSE with the score of each head, [h], that no key has, in rows in use."""
    whole = jnp.logaddexp(lse, sink[:, None])
    whole = whole if used is None else jnp.where(used, whole, lse)
    share = jnp.where(whole == -jnp.inf, 0, jnp.exp(lse - whole))
    return out * by_row(share), whole


class Residuals(NamedTuple):
    """Whatever gradients need: operands as parts read them, the merged results, and names of what
    learns."""

    given: Operands
    out: Array
    lse: Array
    names: Names


def _saved(config: Config, given: Any) -> tuple[Results, Residuals]:
    learned = tuple([name for name, x in given.items() if x.perturbed])
    values = {name: x.value for name, x in given.items()}
    read, dtype = config.stored(values), values["q"].dtype
    out, lse = (checkpoint_name(x, config.saved_as) for x in _attend_stored(config, read, dtype))
    return (out, lse), Residuals(read, out, lse, Names(learned))


def _gradients(config: Config, saved: Residuals, cotangents: Any) -> tuple[Gradients]:
    d_out, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    read, (learned,) = saved.given, saved.names
    nothing: Gradients = dict.fromkeys([name for name in read if name not in DESCALES])
    if config.recipe is not None:
        nothing[SCALES] = None
    if (d_out is None and dlse is None) or not learned:
        return (nothing,)
    d_out = jnp.zeros_like(saved.out) if d_out is None else d_out.astype(saved.out.dtype)
    merged = Merged(saved.out, saved.lse, d_out, dlse)
    given = {**read, **{name: config.widened(read, name, read[name]) for name in CARRIERS}}
    found = _of_carriers(config, read, given, merged, "bias" in learned)
    if "sink" in learned:
        found["sink"] = _of_sink(given["sink"], merged, config.used(given))
    made = {name: x.astype(given[name].dtype) for name, x in found.items() if name in learned}
    return ({**nothing, **made},)


def _of_carriers(
    config: Config, read: Operands, given: Operands, merged: Merged, bias_learns: bool
) -> dict[str, Array]:
    """Gradients of q, k, v and, where it learns, of the bias, in the dtype of sums. read: the
    operands as they travel; given: what they stand for."""
    axes = varying([*given.values(), *merged[:3]])
    names = [*"qkv", *["bias"] * bias_learns]
    dtype = sums_of(given["q"])
    zero = {name: spread(jnp.zeros(given[name].shape, dtype), axes) for name in names}
    learned, (dk, dv) = Learned(zero["q"], zero.get("bias")), (zero["k"], zero["v"])
    words = replace(config.words, stored="")
    given = {name: x for name, x in given.items() if name not in DESCALES}
    for visit in config.visits:
        k, v = (config.widened(read, name, config.at_hand(visit, read[name])) for name in "kv")
        run = partial(_learned, words, given, k, v, merged)
        nothing = [spread(jnp.zeros(x.shape, dtype), axes) for x in (k, v)]
        learned, made_k, made_v = config.chosen(visit, run, (learned, *nothing))
        dk, dv = (config.returned(visit, x, total) for x, total in ((made_k, dk), (made_v, dv)))
    found = {"q": learned.queries, "k": dk, "v": dv}
    return found if learned.bias is None else {**found, "bias": learned.bias}


def _learned(
    words: Words,
    given: Operands,
    k: Array,
    v: Array,
    merged: Merged,
    parts: Parts,
    state: tuple[Learned, Array, Array],
) -> tuple[Learned, Array, Array]:
    learned, dk, dv = state
    for part in parts:
        bias_learns = learned.bias is not None
        made = backward_part(words, part, given, k, v, merged, bias_learns)
        learned = learned.joined(part, made)
        rows = slice(None), slice(*part.keys)
        dk, dv = dk.at[rows].add(made["dk"]), dv.at[rows].add(made["dv"])
    return learned, dk, dv


def _of_sink(sink: Array, merged: Merged, used: Array | None) -> Array:
    """The gradient of the sink, [h], by the device's queries: −Σ e^(α − LSE) · D."""
    lse = merged.lse
    d = (merged.out.astype(lse.dtype) * merged.d_out.astype(lse.dtype)).sum(-1).swapaxes(1, 2)
    d = d if merged.dlse is None else d - merged.dlse
    shown = lse > -jnp.inf if used is None else used & (lse > -jnp.inf)
    share = jnp.where(shown, jnp.exp(sink.astype(lse.dtype)[:, None] - lse), 0)
    return -jnp.where(shown, share * d, 0).sum((0, 2))
