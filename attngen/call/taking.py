"""Functions of many arguments, each of which is a field of one dataclass.

The dataclass lists names, order and defaults once; the function gets it filled in, and type
checkers and `inspect.signature` see its fields as the function's arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
Self = TypeVar("Self")

_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
NONE: Mapping[str, str] = MappingProxyType({})


class Fields(NamedTuple):
    """A dataclass as a function's arguments: its fields, and what else these were called."""

    arguments: Callable[..., Any]
    names: frozenset[str]
    older: Mapping[str, str]

    def filled(self, name: str, args: Any, given: dict[str, Any]) -> Any:
        """The dataclass of a call of the function of this name. Raises: TypeError, as it does."""
        try:
            return self.arguments(*args, **given)
        except TypeError as error:  # which names the dataclass's own function
            known = self._known(name, given)
            if known is given:
                made_by = f"{_name_of(self.arguments)}.__init__"
                raise TypeError(str(error).replace(made_by, name)) from None
        return self.filled(name, args, known)

    def _known(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of today's names; the same ones where they are. Raises: TypeError where there
        is no such argument."""
        if self.names.issuperset(given):
            return given
        found = {self.older.get(each, each): value for each, value in given.items()}
        for unknown in found.keys() - self.names:
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}")
        return found


def fields_of(arguments: Callable[..., Any], older: Mapping[str, str] = NONE) -> Fields:
    """The fields of a dataclass. older: other spellings, and those of the fields."""
    return Fields(arguments, frozenset(inspect.signature(arguments).parameters), older)


def taking(
    arguments: Callable[P, A],
    older: Mapping[str, str] = NONE,
    quickly: Callable[..., Any] | None = None,
) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Let a function of one value of this dataclass be called with its fields, by position or by
    name. older: other spellings, and those of the fields. quickly: of the arguments as they are
    given, the result where no value is needed; else None. Raises: TypeError, as Python does, for
    others."""
    fields = fields_of(arguments, older)

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> R:
            if quickly is not None:
                found: R | None = quickly(args, given)
                if found is not None:
                    return found
            return function(fields.filled(function.__name__, args, given))

        _describe(called, arguments)
        return called

    return decorate


def method_taking(
    arguments: Callable[P, A],
    older: Mapping[str, str] = NONE,
    quickly: Callable[..., Any] | None = None,
) -> Callable[[Callable[[Self, A], R]], Callable[Concatenate[Self, P], R]]:
    """Let a method of one value of this dataclass be called with its fields, as `taking` does.

    quickly: of the object and its arguments as they are given, the result where no value is needed;
    else None.
    """
    fields = fields_of(arguments, older)

    def decorate(method: Callable[[Self, A], R]) -> Callable[Concatenate[Self, P], R]:
        @functools.wraps(method)
        def called(self: Self, *args: P.args, **given: P.kwargs) -> R:
            if quickly is not None:
                found: R | None = quickly(self, args, given)
                if found is not None:
                    return found
            return method(self, fields.filled(method.__name__, args, given))

        _describe(called, arguments, [_SELF])
        return called  # type: ignore[return-value]  # where self has a name

    return decorate


def _name_of(arguments: Callable[..., Any]) -> str:
    return getattr(arguments, "__qualname__", "")


def _describe(
    function: Any, arguments: Callable[..., Any], first: list[inspect.Parameter] | None = None
) -> None:
    own = inspect.signature(arguments).parameters.values()
    function.__signature__ = inspect.Signature([*(first or []), *own])
