"""Binding: what a call has in common with calls like it, and the tensors that it brings.

A call is its three carriers and a dictionary of what else was given. Whatever is None, or not given
at all, has its default, so the key of a call is as long as what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .positions import PLACES_SLOT
from .table import CARRIERS, ROWS, names

Key = tuple[Any, ...]
Given = Mapping[str, Any]
Bind = Callable[[Key, Any, Any, Any, Given], tuple[Key | None, list[Any]]]

_PLAIN = frozenset((bool, float))  # whose values may equal ints: a key has them with their type
_NUMBERS = frozenset(names("number", "longest"))  # which tensors may stand for
_TABLES, _STATES = frozenset(names("tables")), frozenset(names("state"))
_FUNCTIONS = frozenset(names("function"))
_UNUSUAL = _TABLES | _STATES | _FUNCTIONS
_LONGEST = frozenset(names("longest"))


def binder(tensor_type: type) -> Bind:
    """The function that binds calls whose tensors are of this type.

    It takes the state of the library that a call depends on beside its arguments, q, k, v and what
    else is given. It returns the key of the call and its tensors: q, k and v, and others in the
    order in which they are given. The key is None where later calls may differ in what it does not
    say: functions, and numbers in tensors. Its values may have no hash.
    """

    def bind(state: Key, q: Any, k: Any, v: Any, given: Given) -> tuple[Key | None, list[Any]]:
        key, keyed = [k is None, v is None, *state], True
        tensors = [q, k, v]
        if k is None or v is None:
            tensors = [q, *[x for x in (k, v) if x is not None]]
        for name, value in given.items():
            kind = type(value)
            if kind is str or kind is int:
                key += name, value
            elif kind is tensor_type and name not in _NUMBERS:
                key += name, None
                tensors.append(value)
            elif kind in _PLAIN or (kind is tuple and name not in _TABLES):
                key += name, kind, value
            elif value is None:
                continue
            elif isinstance(value, tensor_type):
                if name in _NUMBERS:  # one of the longest lengths nobody reads
                    keyed = keyed and name in _LONGEST and _is_one(value)
                else:
                    key += name, None
                    tensors.append(value)
            elif name in _UNUSUAL:
                keyed = _bind_unusual(name, value, key, tensors, tensor_type) and keyed
            else:
                key += name, kind, tuple(value) if kind is list else value
        return tuple(key) if keyed else None, tensors

    return bind


def _is_one(tensor: Any) -> bool:
    return bool(tensor.numel() == 1)


def _bind_unusual(
    name: str, value: Any, key: list[Any], tensors: list[Any], tensor_type: type
) -> bool:
    """Add such an argument to the key and the tensors; whether the key then says all of it."""
    if name in _STATES:
        key += name, None
    elif name in _TABLES and isinstance(value, (tuple, list)):
        key += name, type(value), len(value)
        tensors += value
        return all([isinstance(table, tensor_type) for table in value])
    else:
        key += name, type(value), value
    return name not in _FUNCTIONS


def homes_of(
    q: Any, k: Any, v: Any, given: Given, slots: Mapping[str, str], tensor_type: type
) -> dict[str, int]:
    """Places of a call's operands among its bound tensors, by the names that operations have for
    them; one table of pages is that of K and of V. slots: those of arguments that fragments add."""
    carriers = zip(CARRIERS, (q, k, v), strict=True)
    present = [name for name, x in carriers if x is not None]
    slots = {"places": PLACES_SLOT, **slots}
    homes = {name: place for place, name in enumerate(present)}
    end = len(homes)
    for name, value in given.items():
        row = ROWS.get(name)
        own = (slots.get(name, ""),)
        kind, operands = (row.kind, row.operands or own) if row else ("tensor", own)
        if kind == "tables" and isinstance(value, (tuple, list)):
            homes |= {each: end + n for n, each in enumerate(operands[: len(value)])}
            end += len(value)
        elif isinstance(value, tensor_type) and kind not in ("longest", "state"):
            homes |= dict.fromkeys(operands, end)
            end += 1
    return homes
