"""The cache of calls: what was worked out for one serves those that differ in addresses alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

RECENT = 4  # calls with the same key that guards tell apart; older ones are found by their formats
KEYS = 1024
FORMATS = 4096

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Guarded(Generic[Value]):
    """A value for calls whose tensors pass `check(*tensors)`.

    pick: takes each of their tensors once, if one is given twice; same: pairs of places that hold
    one tensor.
    """

    check: Callable[..., bool]
    value: Value
    pick: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    same: tuple[tuple[int, int], ...] = ()

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors, of which some are given twice, are of these formats."""
        for one, other in self.same:
            if tensors[one] is not tensors[other]:
                return False
        return self.pick is not None and self.check(*self.pick(tensors))


class CallCache(Generic[Value]):
    """Values by the key of a call and the formats of its tensors.

    guard: makes the guards of some tensors, each given once. `recent` holds what guards tell apart,
    which is quick; `by_format` all that was made, under keys that have the formats in them.
    """

    def __init__(self, guard: Callable[[Sequence[Any]], Any]) -> None:
        self._guard = guard
        self.recent: dict[Any, list[Guarded[Value]]] = {}
        self.by_format: dict[Any, Value] = {}

    def find(self, key: Any, tensors: Sequence[Any]) -> Value | None:
        """The value noted for this key and tensors of these formats; None of a key that is None or
        has no hash."""
        try:
            known = self.recent.get(key, ())
        except TypeError:
            return None
        for each in known:
            if each.check(*tensors) if each.pick is None else each.fits(tensors):
                return each.value
        return None

    def note(self, key: Any, tensors: Sequence[Any], value: Value) -> None:
        """Make `find` find the value, unless the key has no hash."""
        try:
            known = self.recent.get(key, [])
        except TypeError:
            return
        first = {id(tensor): place for place, tensor in reversed([*enumerate(tensors)])}
        pairs = [(first[id(tensor)], place) for place, tensor in enumerate(tensors)]
        same = tuple((one, other) for one, other in pairs if one != other)
        pick = _picker(sorted(first.values())) if same else None
        guards = self._guard(tensors if pick is None else pick(tensors))
        if len(self.recent) >= KEYS:
            self.recent.clear()
        # In one assignment: another thread may be looking.
        made = Guarded(guards.check, value, pick, same)
        self.recent[key] = [made, *known[: RECENT - 1]]

    def keep(self, formats: Any, value: Value) -> None:
        """Make `by_format` have the value."""
        if len(self.by_format) >= FORMATS:
            self.by_format.clear()
        self.by_format[formats] = value

    def remember(self, formats: Any, make: Callable[[], Value]) -> Value:
        """The value that `make` makes for these formats, once."""
        value = self.by_format.get(formats)
        if value is None:
            value = make()
            self.keep(formats, value)
        return value


def _picker(places: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The function that takes elements at some places."""
    if len(places) == 1:
        (place,) = places
        return lambda tensors: (tensors[place],)
    return itemgetter(*places)
