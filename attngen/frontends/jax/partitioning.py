"""Shardings: sequences and heads of operands that are spread over a mesh stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ...call.fragments import SLOTS, operands_of
from ...call.table import CARRIERS, GRADIENT_OF, PAGE_TABLES
from ...fragments.program import has_program
from ...spec import layouts
from ...spec.call_arguments import TOKEN_AXES
from .operation import Form, bind

OF_HEADS = ("alibi_slopes", "sink")
OPERAND_OF = {gradient: name for name, gradient in GRADIENT_OF.items()}
REDUCED = {
    **dict.fromkeys(("dk", "dv", "dsink", "dbias"), jax.lax.psum),
    **dict.fromkeys(("amax_s", "amax_o", "max_logit"), jax.lax.pmax),
}
"""Results that parts of a call add up, or take the largest of."""


def partitioned(form: Form) -> Any:
    """The function of a form's operands, whose sequences and heads may be sharded. What else is
    sharded is gathered first, and everything of a call with dropout, whose bits depend on the
    numbers of sequences and heads, or with a traced function, which knows these."""
    function = custom_partitioning(partial(bind, form))
    function.def_partition(
        partition=partial(_partition, form),
        infer_sharding_from_operands=partial(_of_results, form),
        sharding_rule=partial(_rule, form),
    )
    return function


def axes_of(form: Form, name: str, shape: Sequence[int]) -> list[str]:
    """A letter for each axis of an operand or a result: `b` for sequences and `h` for heads, which
    may be sharded, `-` for what may not."""
    if form.arguments.dropout_p > 0 or has_program(form.arguments.score_mod.split("+")):
        return ["-"] * len(shape)
    name = OPERAND_OF.get(name, name)
    layout = layouts.parse(form.arguments.layout)
    if name in ("o", "d_o"):
        axes = [*layout.q_format]
    elif name in CARRIERS:
        axes = layouts.axes_of(layout, name)
    elif name in ("lse", "dlse"):
        axes = [*("ht" if layout.q_format == "thd" else "bhs")]
    elif name in ("bias", "attn_mask"):
        axes = [*"bhst"][4 - len(shape) :]
    elif name in OF_HEADS or name in _slots_of_heads(form):
        axes = [*"bh"][2 - len(shape) :]
    elif name.startswith("descale_") and len(shape) > 1:
        axes = [*"bhs"][: len(shape)]
    elif name.startswith("seqused") or name in PAGE_TABLES:
        axes = ["b", *["-"] * (len(shape) - 1)]
    elif name == "max_logit":
        axes = ["h"]
    else:
        axes = ["-"] * len(shape)
    packed = layout.q_format == "thd" or any(slot in form.names for slot in SLOTS)
    kept = "h" if packed or layout.paged else "bh"
    return [
        axis if axis in kept and size > 1 else "-" for axis, size in zip(axes, shape, strict=True)
    ]


def _slots_of_heads(form: Form) -> set[str]:
    """The operands of fragments that are numbers of heads, [h_q] or [b, h_q]."""
    found = operands_of(form.arguments.mask, form.arguments.score_mod)
    return {each.slot for each in found if each.operand.domain in ("head", "batch_head")}


def _sizes(form: Form, operands: Sequence[Any]) -> tuple[int, int]:
    """Query heads, and key/value heads, of a call."""
    layout = layouts.parse(form.arguments.layout)
    shapes = dict(zip(form.names, (x.shape for x in operands), strict=True))
    found = []
    for name in ("q", "k"):
        carrier, _, _ = layout.home(name)
        axes = layouts.axes_of(layout, carrier)
        found.append(int(shapes[carrier][axes.index("h")]))
    heads, groups = found
    return heads, groups


class _Axes:
    """Names of mesh axes along which a call's sequences and heads are sharded, None for none."""

    def __init__(self, form: Form, operands: Sequence[Any]) -> None:
        self._form = form
        self.of: dict[str, Any] = {"b": None, "h": None}
        carriers = dict(zip(form.names, operands, strict=True))
        q = carriers["q"]
        spec = _spec_of(q)
        for axis, names in zip(axes_of(form, "q", q.shape), spec, strict=True):
            if axis in self.of:
                self.of[axis] = names
        if self.of["h"] is not None and not self._divides(operands, q.sharding.mesh):
            self.of["h"] = None

    def _divides(self, operands: Sequence[Any], mesh: Any) -> bool:
        """Whether each part has whole groups of query heads."""
        heads, groups = _sizes(self._form, operands)
        if groups == 1:  # which each part has whole
            groups = heads
        names = self.of["h"] if isinstance(self.of["h"], tuple) else (self.of["h"],)
        parts = 1
        for name in names:
            parts *= mesh.shape[name]
        return groups % parts == 0

    def spec(self, name: str, shape: Sequence[int]) -> PartitionSpec:
        """How an operand or a result of that name is sharded."""
        return PartitionSpec(*[self.of.get(x) for x in axes_of(self._form, name, shape)])

    def reduced(self, name: str, shape: Sequence[int]) -> tuple[Any, ...]:
        """Axes of the mesh along which parts of a result are to be joined."""
        if name not in REDUCED:
            return ()
        own = axes_of(self._form, name, shape)
        found: list[Any] = []
        for axis, names in self.of.items():
            if names is not None and axis not in own:
                found += names if isinstance(names, tuple) else [names]
        return tuple(found)


def _spec_of(x: Any) -> tuple[Any, ...]:
    spec = tuple(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else ()
    return (*spec, *(None,) * (len(x.shape) - len(spec)))


def _of_results(form: Form, mesh: Any, operands: Any, results: Any) -> list[NamedSharding]:
    axes = _Axes(form, operands)
    return [
        NamedSharding(mesh, axes.spec(name, x.shape))
        for name, x in form.results(operands).items()
    ]


def _partition(form: Form, mesh: Any, operands: Any, results: Any) -> Any:
    axes = _Axes(form, operands)
    taken = tuple(
        NamedSharding(mesh, axes.spec(name, x.shape))
        for name, x in zip(form.names, operands, strict=True)
    )
    made = _of_results(form, mesh, operands, results)
    apart = {name: axes.reduced(name, x.shape) for name, x in form.results(operands).items()}

    def local(*parts: Array) -> list[Array]:
        found = dict(zip(apart, bind(form, *parts), strict=True))
        return [_joined(name, x, apart[name]) for name, x in found.items()]

    return mesh, local, made, taken


def _joined(name: str, x: Array, axes: tuple[Any, ...]) -> Array:
    """A result of parts along these axes of the mesh, from each of them."""
    if not axes:
        return x
    joined: Array = REDUCED[name](x.astype("float32"), axes)  # type: ignore[no-untyped-call]
    return joined.astype(x.dtype)


def _rule(form: Form, mesh: Any, operand_types: Any, result_types: Any) -> Any:
    """The rule by which Shardy spreads shardings: a letter for each axis."""
    shapes = [tuple(x.shape) for x in operand_types], [tuple(x.shape) for x in result_types]
    operand_shapes, result_shapes = shapes
    stands = [jax.ShapeDtypeStruct(shape, "float32") for shape in operand_shapes]
    heads, groups = _sizes(form, stands)
    counted = _Factors(1 if groups == 1 else heads // groups)
    left = [
        counted.of(form, name, shape)
        for name, shape in zip(form.names, operand_shapes, strict=True)
    ]
    right = [
        counted.of(form, name, shape)
        for name, shape in zip(form.result_names, result_shapes, strict=True)
    ]
    sizes = {"r": counted.group} if "r" in counted.whole else {}
    return f"{', '.join(left)} -> {', '.join(right)}", {
        **sizes,
        "need_replication_factors": tuple(counted.whole),
    }


class _Factors:
    """Factors of a rule: `b` of sequences, `g` of key/value heads, `r` of the heads of a group, and
    one of its own for each axis that stays whole. Where one head of keys serves all, `g` are the
    query heads."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.whole: list[str] = []

    def of(self, form: Form, name: str, shape: Sequence[int]) -> str:
        """The factors of an operand's axes."""
        of_keys = name in ("k", "v", "dk", "dv") or name.startswith("descale_")
        if name == "descale_q" and len(shape) == TOKEN_AXES:
            of_keys = False
        heads = "g" if of_keys else "(g r)"
        found = []
        for axis in axes_of(form, name, shape):
            if axis == "-":
                found.append(f"w{len(self.whole)}")
                self.whole.append(f"w{len(self.whole)}")
            elif axis == "h":
                found.append("g" if self.group == 1 else heads)
                if self.group > 1 and heads != "g" and "r" not in self.whole:
                    self.whole.append("r")
            else:
                found.append("b")
        return " ".join(found)
