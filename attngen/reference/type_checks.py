"""Whether the arguments of a call are tensors, numbers and callables where these are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ..call.table import ROWS, names
from .subclasses import unreadable
from .wording import kind_of

# Scales of FP8 and ALiBi's slopes are refused where their shapes are.
TENSORS = names("tensor", "lengths")
SHAPED = names("slopes", "scale")
NUMBERS = {name: ROWS[name].default for name in names("number", "longest")}


def type_violations(given: Mapping[str, Any]) -> Iterator[str]:
    """Find arguments of `attention` of wrong types. given: by name; q must be among them."""
    for name in TENSORS:
        value = given.get(name)
        if not isinstance(value, Tensor) and (value is not None or name == "q"):
            yield f"{name} needs a tensor; got {kind_of(value)}. Pass a torch.Tensor."
    for name, value in _tensors(given):
        if reason := unreadable(value):
            yield f"{name} {reason}"
    tables = given.get("page_table")
    for table in tables if isinstance(tables, (tuple, list)) else (tables,):
        if not isinstance(table, Tensor) and tables is not None:
            yield (
                f"page_table needs a tensor, or a pair of them for K and V; got {kind_of(table)}. "
                f"Pass a torch.Tensor."
            )
    for name, default in NUMBERS.items():
        value = given.get(name, default)
        if not (value is default or _is_number(value)):
            yield f"{name} needs a number; got {kind_of(value)}. Its default is {default}."
    for name in names("flag"):
        if not is_flag(value := given.get(name, False)):
            yield f"{name} needs True or False; got {kind_of(value)}. Pass one, or leave it out."
    for name in ("score_mod", "mask_mod"):
        value = given.get(name)
        if name == "score_mod" and isinstance(value, str):
            continue  # the names of fragments
        if value is not None and not callable(value):
            yield f"{name} needs a function; got {kind_of(value)}. Pass one, or leave it out."
    block_mask = given.get("block_mask")
    if block_mask is not None and not hasattr(block_mask, "mask_mod"):
        yield (
            f"block_mask needs a BlockMask of FlexAttention; got {kind_of(block_mask)}. "
            f"Make one with create_block_mask, or pass bools as attn_mask."
        )


def _tensors(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among the arguments, with its name."""
    tables = given.get("page_table")
    paired = tables if isinstance(tables, (tuple, list)) else (tables,)
    named = [(name, given.get(name)) for name in (*TENSORS, *SHAPED)]
    for name, value in (*named, *(("page_table", table) for table in paired)):
        if isinstance(value, Tensor):
            yield name, value


def is_flag(value: object) -> bool:
    """Whether this is a truth value, or what stands for one: a number, None."""
    return hasattr(value, "__bool__")


def _is_number(value: object) -> bool:
    """Whether this is a real number, of Python or NumPy, or a tensor with one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    # In a trace a number may be symbolic, and be asked for nothing but its type.
    if isinstance(value, (int, float)):
        return True
    return hasattr(value, "__float__") and not hasattr(value, "__len__")  # nor an array
