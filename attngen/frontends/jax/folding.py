"""`jax.vmap`: elements of a mapped call become sequences of one call, and are not looped over.

Where that is not the same, as of dropout, whose bits depend on the number of a sequence, or of the
gradient of a sink, which is a sum over sequences, they are calls one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from ...call.fp8_checks import BACKWARD_SCALES
from ...call.fragments import SLOTS
from ...call.table import CARRIERS, PAGE_TABLES
from ...spec import layouts
from ...spec.call_arguments import TOKEN_AXES
from .operation import Form

BROADCASTS = ("bias", "attn_mask")
DESCALES = ("descale_q", "descale_k", "descale_v")  # which a backward takes one of for all
ROWS = ("lse", "dlse")
LIKE_Q = ("o", "d_o", "dq")
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v"}
# A single one serves all sequences.
SHARED = ("sink", "rng_state", "scale_s", "descale_s", "scale_o", *BACKWARD_SCALES, *SLOTS)


@dataclass(frozen=True)
class Fold:
    """How elements of a mapped call become one call.

    size: how many there are; mapped: whether each operand has the mapped axis, by its name;
    sequences: those of an element.
    """

    form: Form
    size: int
    mapped: Mapping[str, bool]
    sequences: int

    @property
    def layout(self) -> layouts.Layout:
        """The call's layout."""
        return layouts.parse(self.form.arguments.layout)

    @property
    def possible(self) -> bool:
        """Whether one call computes what calls one after another would."""
        arguments, wanted = self.form.arguments, self.form.wanted
        alone = any(self.mapped.get(name, False) for name in SHARED)
        summed = wanted is not None and wanted.dsink
        fragments = any(name in self.mapped for name in SLOTS)
        reduced = arguments.max_logit or arguments.amax
        scaled = wanted is not None and any(self.mapped.get(name, False) for name in DESCALES)
        return not (
            alone or summed or fragments or reduced or scaled or arguments.dropout_p > 0
        )

    def operands(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Operands of the one call. given: those of the mapped one, its axis first."""
        found = {}
        for name, x in given.items():
            if name in SHARED:
                found[name] = x
            elif name in BROADCASTS:
                found[name] = self._broadcast(name, x)
            elif name in DESCALES and x.ndim == TOKEN_AXES + self.mapped[name]:
                found[name] = self._merged(name, x, given)
            elif name == "alibi_slopes" or name in DESCALES:
                found[name] = self._by_head(name, x, given)
            elif not name.startswith("cu_seqlens"):
                found[name] = self._merged(name, x, given)
        return {**found, **self._ends(given)}

    def _whole(self, name: str, x: Array) -> Array:
        """An operand with the mapped axis first, whether or not it has it."""
        return x if self.mapped[name] else jnp.broadcast_to(x, (self.size, *x.shape))

    def _merged(self, name: str, x: Array, given: Mapping[str, Array]) -> Array:
        """An operand with its elements' sequences, tokens or pages in a row."""
        own_pages = self.mapped["k"] or self.mapped.get("v", False)
        if name in ("k", "v") and self.layout.paged and not own_pages:
            return x
        x = self._whole(name, x)
        if name in PAGE_TABLES and own_pages:
            pages = self._along(name.rpartition("_")[2], "pages", given)
            x = x + pages * jnp.arange(self.size, dtype=x.dtype)[:, None, None]
        axis = self.axis(name)
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def _along(self, name: str, axis: str, given: Mapping[str, Array]) -> int:
        """The length of an axis of an element's q, k or v."""
        home, _, _ = self.layout.home(name)
        shape = given[home].shape[1:] if self.mapped[home] else given[home].shape
        return int(shape[layouts.axes_of(self.layout, home).index(axis)])

    def axis(self, name: str) -> int:
        """The axis of an operand, or of a result, along which sequences or tokens lie."""
        if name in ROWS:
            return 1 if self.layout.q_format == "thd" else 0
        if name in DESCALES:  # of tokens
            fmt = self.layout.q_format if name == "descale_q" else self.layout.kv_format
            return 2 if fmt == "thd" else 0
        if name in LIKE_Q and name != "dq":
            axes = [*self.layout.q_format]
        elif (carrier := GRADIENTS.get(name, name)) in CARRIERS:
            axes = layouts.axes_of(self.layout, carrier)
        else:
            return 0
        return next(place for place, axis in enumerate(axes) if axis in ("b", "t", "pages"))

    def _broadcast(self, name: str, x: Array) -> Array:
        """A broadcast of [b, h, s_q, s_kv]; one for all sequences stays one, but where its gradient
        is wanted of each element."""
        wanted = self.form.wanted
        learned = name == "bias" and wanted is not None and wanted.dbias
        mapped = self.mapped[name]
        own = x.shape[1:] if mapped else x.shape
        shape = (1,) * (4 - len(own)) + own
        if not mapped and not learned and shape[0] == 1:
            return x
        x = x.reshape(self.size if mapped else 1, *shape)
        _, batches, *rest = x.shape
        b = self.sequences if batches == 1 else batches
        return jnp.broadcast_to(x, (self.size, b, *rest)).reshape(-1, *rest)

    def _by_head(self, name: str, x: Array, given: Mapping[str, Array]) -> Array:
        """Numbers of heads, [h] or [b, h], or a scale [1]."""
        mapped = self.mapped[name]
        if not mapped and x.ndim == 1:
            return x
        x = self._whole(name, x)
        if x.ndim == 2:
            x = x[:, None]
        heads = x.shape[-1]
        if name.startswith("descale_") and heads == 1:
            heads = self._along("k", "h", given)
        return jnp.broadcast_to(x, (self.size, self.sequences, heads)).reshape(-1, heads)

    def _ends(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Cumulative lengths of the one call, and where its sequences begin: elements lie behind
        each other, with whatever gaps they have."""
        found = {}
        for side, carrier in (("q", "q"), ("kv", "k")):
            name = f"cu_seqlens_{side}"
            if name not in given:
                continue
            ends = self._whole(name, given[name])
            starts, padded = ends, f"{name}_padded"
            if padded in given:
                starts = self._whole(padded, given[padded])
            tokens = self._along(carrier, "t", given)
            first = jnp.arange(self.size, dtype=ends.dtype)[:, None] * tokens
            last = jnp.full(1, self.size * tokens, ends.dtype)
            nothing = jnp.zeros(1, ends.dtype)
            lengths = jnp.diff(ends, axis=1).reshape(-1)
            found[name] = jnp.concatenate([nothing, jnp.cumsum(lengths, dtype=ends.dtype)])
            found[padded] = jnp.concatenate([(starts[:, :-1] + first).reshape(-1), last])
        return found

    def results(
        self, made: Mapping[str, Array], shapes: Mapping[str, Sequence[int]]
    ) -> list[Array]:
        """Results of each element, the mapped axis first, of those of the one call. shapes: of an
        element's."""
        return [self._apart(name, made[name], shapes[name]) for name in shapes]

    def _apart(self, name: str, x: Array, shape: Sequence[int]) -> Array:
        if name == "dbias":
            return self._of_bias(x, shape)
        axis = self.axis(name)
        x = x.reshape(*shape[:axis], self.size, *shape[axis:])
        return jnp.moveaxis(x, axis, 0)

    def _of_bias(self, x: Array, shape: Sequence[int]) -> Array:
        """The gradient of a bias, a sum over the sequences of an element that shared it."""
        x = x.reshape(self.size, self.sequences, *x.shape[1:])
        batches, *_ = (1,) * (4 - len(shape)) + tuple(shape)
        if batches == 1 < self.sequences:
            x = x.astype(jnp.float32).sum(1, keepdims=True).astype(x.dtype)
        return x.reshape(self.size, *shape)
