"""Faults of functions of positions that show before they are called."""

from __future__ import annotations

import inspect

from ..errors import SpecError

ARGUMENTS = {"score_mod": ("score", "b", "h", "i", "j"), "mask_mod": ("b", "h", "i", "j")}


def check_function(name: str, function: object) -> None:
    """Hold what a call gives as `score_mod` or `mask_mod` to be a function of its arguments.

    Raises: SpecError.
    """
    if not callable(function):
        raise SpecError(f"{name} needs a function; got {function!r}. Pass one, or leave it out.")
    wanted = ARGUMENTS[name]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of what is not written in Python
        return
    try:
        signature.bind(*wanted)
    except TypeError as error:
        raise SpecError(
            f"{name} is called as {name}({', '.join(wanted)}); got a function of {signature}. "
            "Give it these arguments."
        ) from error
