"""Geometry: where the copy engine finds the operands of a kernel, as its tensor maps say it."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..spec.problem import DTYPE_BYTES
from .program import KernelEntry, TensorMapRecipe
from .run_time import Extent

BOX_BYTES = 128  # of a row, that the copy engine swizzles
LONGEST = 1 << 30  # positions that a tensor map allows a sequence, more than any has
TMA_STRIDE_LIMIT = 1 << 40  # bytes


class Geometry(NamedTuple):
    """A tensor map: sizes, strides (bytes, but for that of the elements), what a copy brings of
    each dimension, and what the kernel reads behind the map."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    units: tuple[int, ...] = ()


def geometry_of(kernel: KernelEntry, recipe: TensorMapRecipe, extent: Extent) -> Geometry:
    """The geometry of an operand of the kernel.

    Where lengths vary, a box must end where its sequence does. A sequence of l positions has the
    last l of LONGEST rows. Another axis, of steps that rows and batch are multiples of (the units),
    moves the box by the sequence's place and its l rows, and the last one moves it LONGEST rows
    back, since addresses are counted modulo 2^64: 2^30 times a stride of 2^34 bytes, less a row.
    """
    if recipe.paged:
        return page_geometry(recipe, extent)
    row, head, batch = _stride_bytes(recipe, extent)
    of_keys = recipe.tensor in ("k", "v", "dk", "dv")
    sequence = kernel.kv_seq if of_keys else kernel.q_seq
    box = (recipe.box_cols, recipe.box_rows, 1, 1)
    if sequence == "dense" or recipe.spare:
        return Geometry((extent.dim, *extent[1:3], extent.batch), (row, head, batch), box)
    places, start = (extent.seq, row) if sequence == "packed" else (extent.batch, batch)
    step = math.gcd(row, start) or 16  # all rows are one where a tensor is expanded
    units = (row // step, start // step)
    shift = extent.seq * units[0] + places * units[1]
    sizes = (extent.dim, LONGEST, extent.heads, shift + 1, LONGEST + 1)
    return Geometry(sizes, (row, head, step, (1 << 34) - row), (*box, 1), units)


def page_geometry(recipe: TensorMapRecipe, extent: Extent) -> Geometry:
    """The geometry of pages, whose rows count in groups of 8, as in copy/paged_blocks.cuh.

    Boxes that make up a head's columns follow each other in each group. A copy brings them all, of
    several groups, where its rows are whole groups and heads lie whole boxes apart; else a box of
    one group. Where they do not, it brings one box of as many rows as a page has in common with it.
    """
    row, head, page = _stride_bytes(recipe, extent)
    rows = math.gcd(recipe.box_rows & -recipe.box_rows, extent.seq)
    boxes, rest = divmod(extent.dim, recipe.box_cols)
    grouped = boxes > 1 and not rest
    groups, strides = -(-extent.seq // 8), (row, head, 8 * row, page)
    if grouped and rows >= 8 and head and head % BOX_BYTES == 0:
        apart = head // BOX_BYTES
        sizes = (recipe.box_cols, 8, apart * (extent.heads - 1) + boxes, groups, extent.batch)
        box = (recipe.box_cols, 8, boxes, rows // 8, 1)
        return Geometry(sizes, (row, BOX_BYTES, *strides[2:]), box, (apart,))
    sizes = (extent.dim, 8, extent.heads, groups, extent.batch)
    box = (recipe.box_cols, min(rows, 8), 1, 1 if grouped else max(1, rows // 8), 1)
    return Geometry(sizes, strides, box, (0,))


def boxed(recipe: TensorMapRecipe, extent: Extent) -> bool:
    """Whether the copy engine can read a tensor that begins at a multiple of 16 bytes."""
    strides = [stride * DTYPE_BYTES[recipe.dtype] for stride in extent[4:7]]
    whole = all(stride % 16 == 0 and stride < TMA_STRIDE_LIMIT for stride in strides)
    return whole and extent.stride_dim == 1


def _stride_bytes(recipe: TensorMapRecipe, extent: Extent) -> tuple[int, int, int]:
    """Strides of seq, head and batch in bytes. One that steps over a single element is free,
    and the copy engine still wants it to be a multiple of 16."""
    size = DTYPE_BYTES[recipe.dtype]
    row = -(-extent.dim * size // 16) * 16
    return (
        extent.stride_seq * size if extent.seq > 1 else row,
        extent.stride_heads * size if extent.heads > 1 else row,
        extent.stride_batch * size if extent.batch > 1 else row,
    )
