"""Functions of TransformerEngine's arguments, each of which is a field of one dataclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...call import taking as fields

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
Self = TypeVar("Self")

# Spellings of arguments before TransformerEngine 2.15, and today's.
OLDER = {"Q": "q", "K": "k", "V": "v", "O": "o", "dO": "d_o", "qkv_dtype": "fake_dtype"}


def taking(
    arguments: Callable[P, A], quickly: Callable[..., Any] | None = None
) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Let a function be called with a dataclass's fields, in any version's spelling of them.
    quickly: as of `call.taking`'s."""
    return fields.taking(arguments, OLDER, quickly)


def method_taking(
    arguments: Callable[P, A], quickly: Callable[..., Any] | None = None
) -> Callable[[Callable[[Self, A], R]], Callable[Concatenate[Self, P], R]]:
    """Let a method be called with them. quickly: as of `call.taking`'s."""
    return fields.method_taking(arguments, OLDER, quickly)
