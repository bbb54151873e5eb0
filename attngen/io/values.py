"""Stable JSON forms of the frozen dataclasses that pass between the stages."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from .text import quoted

T = TypeVar("T")
_INTEGERS = 1 << 63  # as in TOML; Python would not write much larger ones


class DataError(ValueError):
    """Data that is no dataclass's. reasons: why, by the field; "" where it is no object at all."""

    def __init__(self, name: str, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(f"{name}: " + "; ".join(dict.fromkeys(sorted(reasons.values()))))


def to_data(value: Any) -> Any:
    """Plain JSON data (dict, list, str, number, bool, None) of a frozen dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {name: to_data(item) for name, item in value.items()}
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """Canonical JSON: sorted keys, no spaces unless indented; equal values give equal text."""
    separators = (",", ":") if indent is None else None
    return json.dumps(to_data(value), sort_keys=True, indent=indent, separators=separators)


def from_data(cls: type[T], data: Any) -> T:
    """The dataclass `cls` read back from `to_data`.

    Raises: DataError with every missing or unknown field and every value of a wrong type.
    """
    if not isinstance(data, dict):
        raise DataError(cls.__name__, {"": f"expected an object, got {type(data).__name__}"})
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    mistakes: dict[str, str] = {}
    if unknown := sorted(set(data) - set(known)):
        text = f"unknown fields {quoted(unknown)}; known: {sorted(known)}"
        mistakes |= dict.fromkeys(unknown, text)
    if missing := [name for name, f in known.items() if name not in data and _required(f)]:
        mistakes |= dict.fromkeys(missing, f"missing fields {missing}")
    values = {}
    for name in known.keys() & data.keys():
        try:
            values[name] = _coerce(hints[name], data[name], name)
        except ValueError as error:
            mistakes[name] = str(error)
    if mistakes:
        raise DataError(cls.__name__, mistakes)
    return cls(**values)


@cache  # resolving a class's annotations takes longer than reading its fields
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def from_json(cls: type[T], text: str) -> T:
    """The dataclass `cls` read back from `to_json`. Raises: ValueError."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return from_data(cls, data)


def _coerce(hint: Any, item: Any, name: str) -> Any:
    if hint is Any:
        return item
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        if item is None and type(None) in options:
            return None
        first = next(o for o in options if o is not type(None))
        return _coerce(type(item) if type(item) in options else first, item, name)
    if origin is tuple:
        if not isinstance(item, (list, tuple)):
            raise ValueError(f"{name}: expected a list, got {quoted(item)}")
        (element, *_) = typing.get_args(hint)
        return tuple(_coerce(element, each, name) for each in item)
    if origin is dict:
        if not isinstance(item, dict):
            raise ValueError(f"{name}: expected an object, got {quoted(item)}")
        element = typing.get_args(hint)[1]
        return {key: _coerce(element, each, f"{name}.{key}") for key, each in item.items()}
    if origin is typing.Literal:
        if item not in typing.get_args(hint):
            raise ValueError(f"{name}: {quoted(item)} is not one of {typing.get_args(hint)}")
        return item
    if dataclasses.is_dataclass(hint):
        return from_data(hint, item)  # type: ignore[arg-type]
    if type(item) is int and not -_INTEGERS <= item < _INTEGERS:
        raise ValueError(f"{name}: expected 64 bits, got {quoted(item)}")
    if hint is float and type(item) is int:
        return float(item)
    if type(item) is not hint:
        raise ValueError(f"{name}: expected {hint.__name__}, got {quoted(item)}")
    return item
