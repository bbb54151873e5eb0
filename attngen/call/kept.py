"""Values that are worked out once for a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MOST = 4096  # values, before all are forgotten


class Kept(Generic[T]):
    """Values by keys; those of keys that have no hash are made each time."""

    def __init__(self) -> None:
        self._known: dict[Any, T] = {}

    def find(self, key: Any, make: Callable[..., T], *given: Any) -> T:
        """The value of a key, made of what is given where there is none yet."""
        try:
            known = self._known.get(key)
        except TypeError:  # for a list, say
            return make(*given)
        if known is None:
            known = make(*given)
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = known
        return known

    def clear(self) -> None:
        """Forget all values."""
        self._known.clear()
