"""Functions of many arguments, each of which is a field of one dataclass.

The dataclass lists names, order and defaults once; the function gets it filled in, and type
checkers and `inspect.signature` see its fields as the function's arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
Self = TypeVar("Self")

# Spellings of arguments before TransformerEngine 2.15, and today's.
OLDER = {"Q": "q", "K": "k", "V": "v", "O": "o", "dO": "d_o", "qkv_dtype": "fake_dtype"}


def taking(arguments: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Let a function of one value of this dataclass be called with its fields, by position or by
    name, older spellings included. Raises: TypeError, as Python does, for others."""
    names = frozenset(inspect.signature(arguments).parameters)

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> R:
            return function(_filled(function.__name__, arguments, names, args, given))

        _describe(called, arguments)
        return called

    return decorate


def method_taking(
    arguments: Callable[P, A],
) -> Callable[[Callable[[Self, A], R]], Callable[Concatenate[Self, P], R]]:
    """Let a method of one value of this dataclass be called with its fields, as `taking` does."""
    names = frozenset(inspect.signature(arguments).parameters)

    def decorate(method: Callable[[Self, A], R]) -> Callable[Concatenate[Self, P], R]:
        @functools.wraps(method)
        def called(self: Self, *args: P.args, **given: P.kwargs) -> R:
            return method(self, _filled(method.__name__, arguments, names, args, given))

        _describe(called, arguments, [inspect.Parameter("self", _BOTH)])
        return called  # type: ignore[return-value]  # where self has a name

    return decorate


_BOTH = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _filled(
    name: str, arguments: Callable[..., A], names: frozenset[str], args: Any, given: dict[str, Any]
) -> A:
    if not names.issuperset(given):
        given = {OLDER.get(each, each): value for each, value in given.items()}
        for unknown in given.keys() - names:
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}")
    try:
        return arguments(*args, **given)
    except TypeError as error:  # which names the dataclass's own function
        raise TypeError(str(error).replace(f"{_name_of(arguments)}.__init__", name)) from None


def _name_of(arguments: Callable[..., Any]) -> str:
    return getattr(arguments, "__qualname__", "")


def _describe(
    function: Any, arguments: Callable[..., Any], first: list[inspect.Parameter] | None = None
) -> None:
    own = inspect.signature(arguments).parameters.values()
    kept = [each.replace(kind=_BOTH) for each in own]
    function.__signature__ = inspect.Signature([*(first or []), *kept])
