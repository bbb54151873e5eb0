"""Layout names: how Q, K and V lie in memory, as pure data, without torch.

A *format* is the order of the axes of one operand, one letter an axis: `s` position,
`b` sequence, `h` head, `d` element of a head, `t` token of all sequences in a row. So
`shape["sbhd".index("h")]` is the head count of an operand in the format `sbhd`.
A *layout* names the formats of the operands of one call, and says which of them share one
packed tensor. Memory order beyond that is strides, which every caller keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import SpecError

Format = Literal["sbhd", "bshd", "bhsd", "thd"]
Packing = Literal["none", "qkv_3hd", "qkv_h3d", "kv_2hd", "kv_h2d"]

FORMATS: tuple[Format, ...] = ("sbhd", "bshd", "bhsd", "thd")

# Axis along which the operands of a packed tensor lie, counted from the end.
_PACKED_AXIS = {"qkv_3hd": -3, "qkv_h3d": -2, "kv_2hd": -3, "kv_h2d": -2}


_OPERANDS_OF_PACKING: dict[str, tuple[str, ...]] = {
    "none": (),
    "qkv_3hd": ("q", "k", "v"),
    "qkv_h3d": ("q", "k", "v"),
    "kv_2hd": ("k", "v"),
    "kv_h2d": ("k", "v"),
}


@dataclass(frozen=True)
class Layout:
    """Where each operand of a call is found: formats of Q and of K/V, packing, paging.

    packed_operands: names of the operands that share one tensor, in their order along its axis.
    """

    name: str
    q_format: Format
    kv_format: Format
    packing: Packing = "none"
    paged: bool = False
    packed_operands: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed_operands", _OPERANDS_OF_PACKING[self.packing])

    @property
    def formats(self) -> tuple[Format, Format]:
        """The formats of Q, and of K and V."""
        return self.q_format, self.kv_format

    @property
    def masks_end_anywhere(self) -> bool:
        """Whether an `attn_mask` may have any number of positions: packed tokens' and pages'."""
        return self.paged or "thd" in self.formats

    def home(self, operand: str) -> tuple[str, int, int]:
        """Where an operand lies: the tensor of the call, the axis along which that is packed (0 for
        none), and the operand's place on it."""
        if operand not in self.packed_operands:
            return operand, 0, 0
        carrier = self.packed_operands[0]
        return carrier, _PACKED_AXIS[self.packing], self.packed_operands.index(operand)

    @property
    def one_length(self) -> bool:
        """Whether Q, K and V are one tensor and therefore have the same lengths."""
        return self.packing in ("qkv_3hd", "qkv_h3d")


_LAYOUTS = (
    Layout("sb3hd", "sbhd", "sbhd", "qkv_3hd"),
    Layout("sbh3d", "sbhd", "sbhd", "qkv_h3d"),
    Layout("bs3hd", "bshd", "bshd", "qkv_3hd"),
    Layout("bsh3d", "bshd", "bshd", "qkv_h3d"),
    Layout("t3hd", "thd", "thd", "qkv_3hd"),
    Layout("th3d", "thd", "thd", "qkv_h3d"),
    Layout("sbhd_sb2hd", "sbhd", "sbhd", "kv_2hd"),
    Layout("sbhd_sbh2d", "sbhd", "sbhd", "kv_h2d"),
    Layout("bshd_bs2hd", "bshd", "bshd", "kv_2hd"),
    Layout("bshd_bsh2d", "bshd", "bshd", "kv_h2d"),
    Layout("thd_t2hd", "thd", "thd", "kv_2hd"),
    Layout("thd_th2d", "thd", "thd", "kv_h2d"),
    Layout("sbhd_sbhd_sbhd", "sbhd", "sbhd"),
    Layout("bshd_bshd_bshd", "bshd", "bshd"),
    Layout("bhsd_bhsd_bhsd", "bhsd", "bhsd"),
    Layout("thd_thd_thd", "thd", "thd"),
    Layout("sbhd_bshd_bshd", "sbhd", "bshd"),
    Layout("bshd_sbhd_sbhd", "bshd", "sbhd"),
    Layout("thd_bshd_bshd", "thd", "bshd"),
    Layout("thd_sbhd_sbhd", "thd", "sbhd"),
    Layout("paged_kv_bshd_bshd_bshd", "bshd", "bshd", paged=True),
    Layout("paged_kv_bshd_sbhd_sbhd", "bshd", "sbhd", paged=True),
    Layout("paged_kv_sbhd_bshd_bshd", "sbhd", "bshd", paged=True),
    Layout("paged_kv_sbhd_sbhd_sbhd", "sbhd", "sbhd", paged=True),
    Layout("paged_kv_thd_bshd_bshd", "thd", "bshd", paged=True),
    Layout("paged_kv_thd_sbhd_sbhd", "thd", "sbhd", paged=True),
)
_BY_NAME = {layout.name: layout for layout in _LAYOUTS}
_SHORT_NAMES: dict[str, Layout] = {fmt: _BY_NAME[f"{fmt}_{fmt}_{fmt}"] for fmt in FORMATS}

NAMES: tuple[str, ...] = tuple(_BY_NAME)
"""Every full layout name; the four formats are short names of the three-tensor layouts."""


def parse(name: str) -> Layout:
    """The layout of that name; `bshd` is short for `bshd_bshd_bshd`, and so on.

    Raises: SpecError (a ValueError) that lists every name, where there is no such layout.
    """
    layout = (_SHORT_NAMES.get(name) or _BY_NAME.get(name)) if isinstance(name, str) else None
    if layout is None:
        raise SpecError(
            f"layout={name!r} is not a layout. Use one of {', '.join(NAMES)}, "
            f"or a short name: {', '.join(_SHORT_NAMES)}."
        )
    return layout


def unpack(layout: Layout, q: Any, k: Any = None, v: Any = None) -> tuple[Any, Any, Any]:
    """Q, K and V as separate tensors, each in its format: views, nothing is copied.

    q, k, v: the tensors of the call, any objects with `.shape` and `.unbind(axis)`. A
    layout with one packed tensor takes it as q; Q and packed KV take the pair as k.

    Raises: SpecError, where an operand is missing or superfluous, has a wrong number of
    axes, or a packed axis is not 3 (or 2) long.
    """
    check_operands(layout, q, k, v)
    if layout.packing == "none":
        return q, k, v
    axis = _PACKED_AXIS[layout.packing]
    if layout.one_length:
        q, k, v = q.unbind(axis)
    else:
        k, v = k.unbind(axis)
    return q, k, v


def check_operands(layout: Layout, q: Any, k: Any = None, v: Any = None) -> None:
    """Refuse tensors (any objects with `.shape`) that cannot be the operands of the layout.

    Raises: SpecError, as `unpack` does.
    """
    if reasons := _violations(layout, {"q": q, "k": k, "v": v}):
        raise SpecError(reasons)


def size(shape: Sequence[int], fmt: Format, axis: str) -> int:
    """Length of the named axis (one of the format's letters) in an operand of that shape."""
    return shape[fmt.index(axis)]


def shape_of(layout: Layout, operand: str, q: Any, k: Any) -> list[int]:
    """Shape of Q or K in its format, whichever tensor of the call holds it."""
    carrier, axis, _ = layout.home(operand)
    shape = [*(q if carrier == "q" else k).shape]
    if axis:
        del shape[axis]
    return shape


def _violations(layout: Layout, tensors: dict[str, Any]) -> list[str]:
    """Why these tensors cannot be the operands of the layout; empty where they can."""
    carriers = _carriers(layout)
    reasons = []
    for name, tensor in tensors.items():
        if name not in carriers:
            if tensor is not None:
                reasons.append(
                    f"layout={layout.name!r} has {name} packed into {carriers[-1]}; "
                    f"got a separate {name}. Leave {name} out."
                )
            continue
        if tensor is None:
            reasons.append(f"layout={layout.name!r} needs {name}; got None. Pass {name}.")
            continue
        expected = axes_of(layout, name)
        if len(tensor.shape) != len(expected) or not _packed_axis_fits(layout, name, tensor):
            reasons.append(
                f"layout={layout.name!r} needs {name} of shape [{', '.join(expected)}]; "
                f"got {list(tensor.shape)}. Reshape it or name another layout."
            )
    return reasons


def _carriers(layout: Layout) -> tuple[str, ...]:
    """Parameters that carry tensors in this layout; the last one is the packed one, if any."""
    if layout.packing == "none":
        return ("q", "k", "v")
    return ("q",) if layout.one_length else ("q", "k")


def axes_of(layout: Layout, name: str) -> list[str]:
    """Axis names of the tensor passed as `name`, the packed axis included as its length."""
    axes = list(layout.q_format if name == "q" else layout.kv_format)
    if layout.paged and name != "q":
        return ["page_size" if a == "s" else "pages" if a == "b" else a for a in axes]
    if name in layout.packed_operands[:1]:
        axes.insert(len(axes) + 1 + _PACKED_AXIS[layout.packing], str(len(layout.packed_operands)))
    return axes


def order_of_rows(layout: Layout, operand: str) -> list[int]:
    """The places of axes b, h, s, or of packed tokens h, t, among those that rows of q, k or v
    have, one number a row: its tensor's without the last, and without one of operands."""
    carrier, _, _ = layout.home(operand)
    axes = [each for each in axes_of(layout, carrier) if each in "bhst"]
    return [axes.index(each) for each in ("ht" if "t" in axes else "bhs")]


def _packed_axis_fits(layout: Layout, name: str, tensor: Any) -> bool:
    """Whether the packed axis, if this tensor has one, is as long as the operands it holds."""
    if name not in layout.packed_operands[:1]:
        return True
    return bool(tensor.shape[_PACKED_AXIS[layout.packing]] == len(layout.packed_operands))


def is_boxed(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> bool:
    """Whether the copy engine can read a tensor of these strides, wherever it begins at a multiple
    of 16 bytes: the last axis contiguous, other strides multiples of 16 bytes."""
    *steps, last = zip(shape, strides, strict=True)
    for n, step in steps:
        if n > 1 and step * element_bytes % 16:
            return False
    return last[1] == 1 or last[0] <= 1
