"""Values that are worked out once for a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MOST = 4096


class Kept(Generic[T]):
    """Values by keys; those of keys that have no hash are made each time. most: values, before all
    are forgotten."""

    def __init__(self, most: int = MOST) -> None:
        self._known: dict[Any, T] = {}
        self._most = most

    def find(self, key: Any, make: Callable[..., T], *given: Any) -> T:
        """The value of a key, made of what is given where there is none yet."""
        try:
            known = self._known.get(key)
        except TypeError:  # for a list, say
            return make(*given)
        if known is None:
            known = make(*given)
            if len(self._known) >= self._most:
                self._known.clear()
            self._known[key] = known
        return known

    def clear(self) -> None:
        """Forget all values."""
        self._known.clear()
