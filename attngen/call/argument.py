"""Rows of the table of arguments, as metadata of a dataclass's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "tensor",  # one tensor
    "lengths",  # a tensor of integers, one or so a sequence
    "starts",  # a tensor of integers, of which a front end makes lengths
    "scale",  # a tensor, whose type is checked with its shape
    "slopes",  # a tensor, or True for ALiBi's own
    "tables",  # a tensor, or a pair of them for K and V
    "number",  # of Python or NumPy, or a tensor of one, whose value is read in each call
    "longest",  # a number that changes no result of kernels, or a tensor of one, never read
    "flag",
    "word",
    "window",
    "positions",  # two numbers to five
    "dtype",
    "function",
    "state",  # an object of the caller's that lives from call to call
    "result",  # a tensor that is written
    "choice",  # None, True or False
    "fragments",  # what the fragments take that a call names: pairs of a name and a value
]
BROADCAST = ("b", "h_q", "s_q", "s_kv")


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One row of the table.

    kind: what a call may give. doc: what it means. default: its value where a call has none. given:
    the type that a call may give, where it is wider than the field's. shapes: axes of the tensors
    that it may be (of which any may be 1 where they are `BROADCAST`); dtype: theirs, `q` for Q's.
    operands: names under which operations take its tensors, at `place` among all of these, which
    never changes. gradient: name of the gradient that kernels make, empty where they have none;
    differentiable: whether the reference has one. numbers: fields of the operations' `Arguments`
    that it decides. feature: the field of a spec that it switches on by being there. advice: what a
    call whose tensor has no such shape is told to do. front_end: whether the reference does without
    it. decides: whether it decides what a call returns.
    """

    kind: Kind
    doc: str
    default: Any = None
    given: str = ""
    shapes: tuple[tuple[str, ...], ...] = ()
    dtype: str = ""
    operands: tuple[str, ...] = ()
    place: int = -1
    gradient: str = ""
    differentiable: bool = False
    numbers: tuple[str, ...] = ()
    feature: str = ""
    advice: str = ""
    front_end: bool = False
    decides: bool = False
    name: str = ""

    @property
    def has_heads(self) -> bool:
        """Whether a tensor of it may have one number for each head."""
        axes = (axis for shape in self.shapes for axis in shape)
        return not self.is_broadcast and any(axis.startswith("h_") for axis in axes)

    def shapes_for(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Its shapes where axes have these sizes."""
        return [tuple([sizes[axis] for axis in shape]) for shape in self.shapes]

    def wanted(self, sizes: Mapping[str, int]) -> str:
        """Its dtype and shapes for a message, as `float32 [h_q=4] or [b=2, h_q=4]`."""
        shapes = (", ".join(f"{axis}={sizes[axis]}" for axis in shape) for shape in self.shapes)
        return f"{self.dtype} {' or '.join(f'[{shape}]' for shape in shapes)}"

    @property
    def is_broadcast(self) -> bool:
        """Whether its tensor is a broadcast of one number for each score."""
        return self.shapes == (BROADCAST,)


def tensor(operand: str, place: int, doc: str, **more: Any) -> Any:
    """A field for one tensor beside q, k and v."""
    row = Argument(**{"kind": "tensor", "operands": (operand,), **more}, place=place, doc=doc)
    return field(default=None, metadata={"row": row})


def lengths(operand: str, place: int, doc: str, size: str) -> Any:
    """A field for integers of sequences."""
    return tensor(operand, place, doc, kind="lengths", shapes=((size,),), dtype="int32")


def scale(operand: str, place: int, doc: str, *others: tuple[str, ...]) -> Any:
    """A field for a scale of FP8, [1] or of other shapes."""
    shapes = (("1",), *others)
    return tensor(operand, place, doc, kind="scale", shapes=shapes, dtype="float32")


def tables(operands: tuple[str, ...], place: int, doc: str, shape: tuple[str, ...]) -> Any:
    """A field for tables of pages, of K and of V."""
    more: dict[str, Any] = {"shapes": (shape,), "dtype": "int32", "operands": operands}
    row = Argument(kind="tables", doc=doc, place=place, **more)
    return field(default=None, metadata={"row": row})


def other(kind: Kind, doc: str, default: Any = None, **more: Any) -> Any:
    """A field for what is no tensor."""
    row = Argument(kind=kind, doc=doc, default=default, **more)
    return field(default=default, metadata={"row": row})


def carrier(doc: str, **more: Any) -> Any:
    """A field for q, k or v; more: its default, if it has one."""
    return field(**more, metadata={"row": Argument(kind="tensor", doc=doc, differentiable=True)})
