"""Layouts: formats of Q, K and V by their name, and tensors that hold several of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import SpecError
from ...spec.layouts import Layout, parse

DENSE = ("sbhd", "bshd", "bhsd")


class Formats(NamedTuple):
    """Orders of axes by TransformerEngine's names: of a call ("thd_2bshd" where Q's differs from
    K's), of Q, and of K and V."""

    qkv: str
    q: str
    kv: str


def parsed(name: str) -> Layout:
    """The layout of that name. Raises: KeyError, as TransformerEngine does, where there is none."""
    try:
        return parse(name)
    except SpecError as error:
        raise KeyError(name) from error


def get_qkv_format(
    qkv_layout: str = "bshd_bshd_bshd", inference_params: Any = None
) -> tuple[str, str, str]:
    """The formats of a call, of Q, and of K and V, for a layout's name. Those of Q and of K and V
    are told apart with `inference_params` alone."""
    layout = parsed(qkv_layout)
    q, kv = layout.formats
    if inference_params is None:
        return Formats(q, q, q)
    return Formats(q if q == kv else f"{q}_2{kv}", q, kv)


def separate(name: str) -> str:
    """The layout of three tensors, which a layout's three views are also of: "bs3hd" → "bshd"."""
    layout = parsed(name)
    if layout.packing == "none":
        return name
    return layout.q_format


def turned(tensor: Tensor, source: str, target: str) -> Tensor:
    """A view of a tensor of one format in the order of the axes of another. Raises: SpecError where
    one is packed tokens and the other is not."""
    if source == target:
        return tensor
    if source not in DENSE or target not in DENSE:
        raise SpecError(f"a tensor in {source} cannot be read as {target}")
    return tensor.permute([source.index(axis) for axis in target])


def carrier_of(layout: Layout, parts: tuple[Tensor, ...]) -> Tensor | None:
    """The packed tensor that these views are of, in the order in which it holds them; None where
    they do not lie in one as the layout's name says. A view, as the parts are."""
    if layout.packing == "none":
        return None
    first, *_ = parts
    alike = {(x.shape, x.stride(), x.dtype, x.untyped_storage().data_ptr()) for x in parts}
    if len(alike) > 1:
        return None
    offsets = [x.storage_offset() for x in parts]
    start, second, *_ = offsets
    step = int(second - start)
    if step <= 0 or offsets != [*range(start, start + len(parts) * step, step)]:
        return None
    shape, strides = list(first.shape), list(first.stride())
    place = _place(layout, first)
    shape.insert(place, len(parts))
    strides.insert(place, step)
    return torch.as_strided(first, shape, strides, start)


def packed_like(layout: Layout, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies of tensors as views of one new buffer, packed as the layout has its operands."""
    like, *_ = parts
    shape, place = list(like.shape), _place(layout, like)
    shape.insert(place, len(parts))
    views = like.new_empty(shape).unbind(place)
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    return views


def _place(layout: Layout, part: Tensor) -> int:
    """The axis of a packed tensor along which such parts lie."""
    _, axis, _ = layout.home(*layout.packed_operands[:1])
    return part.ndim + 1 + axis
