"""Faults of callables, in words that name the argument, the line and the way out."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import attngen

from ..call.function_checks import check_function
from ..errors import AttngenError, SpecError

_NOT_THEIRS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (attngen.__file__, torch.__file__)
)
# Words of what torch.vmap says, what they mean, and what to do instead.
_MEANINGS = (
    ("control flow", "branches on a tensor", "Choose with torch.where."),
    (
        ".item()",
        "reads a number out of a tensor (.item(), int(), float())",
        "Compute with tensors alone.",
    ),
    (
        "randomness",
        "draws random numbers",
        "Draw them before the call and read them at (b, h, i, j), or pass dropout_p.",
    ),
    ("inplace", "changes a captured tensor in place", "Return a new tensor instead."),
    ("in-place", "changes a tensor in place that it must not", "Return a new tensor instead."),
)


def called(
    name: str, mod: Callable[..., Tensor], mapped: Callable[..., Tensor], given: tuple[Tensor, ...]
) -> Tensor:
    """Call `mapped`, which maps `mod`. Raises: SpecError that says what mod does wrong."""
    if torch.compiler.is_compiling():
        return mapped(*given)
    check_function(name, mod)
    captured = [(tensor, tensor._version) for tensor in _captured(mod)]
    try:
        found = mapped(*given)
    except (AttngenError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise SpecError(_reason(name, error)) from error
    if any(tensor._version != version for tensor, version in captured):
        raise SpecError(
            f"{name} changes a captured tensor in place, of which calls and their gradients would "
            "see different values. Return a new tensor instead."
        )
    return found


def _captured(mod: object) -> Iterator[Tensor]:
    """Tensors that a function takes from around it, as far as it shows them."""
    while isinstance(mod, functools.partial):
        yield from filter(_has_version, (*mod.args, *mod.keywords.values()))
        mod = mod.func
    mod = getattr(mod, "__func__", mod)
    if not inspect.isfunction(mod):
        return
    cells = (cell for cell in mod.__closure__ or ())
    for cell in cells:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if _has_version(value):
            yield value
    names = (mod.__globals__.get(each) for each in mod.__code__.co_names)
    yield from filter(_has_version, (*names, *(mod.__defaults__ or ())))


def _has_version(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _reason(name: str, error: Exception) -> str:
    """Say what an exception out of a callable means."""
    text = str(error)
    first = (text.strip().splitlines() or ["no message"])[0]
    said = f"{type(error).__name__}: {first if len(first) <= 160 else first[:159] + '…'}"
    if isinstance(error, IndexError):
        return (
            f"{name} reads out of range for a pair that takes part{line_of(error)} ({said}). Hide "
            "the pair by a mask, or clamp the index."
        )
    for words, meaning, way_out in _MEANINGS:
        if words in text:
            return f"{name} {meaning}{line_of(error)}. {way_out}"
    return (
        f"{name} fails{line_of(error)} ({said}). It gets one pair at a time, as tensors without "
        "axes, and returns one."
    )


def line_of(error: BaseException) -> str:
    """Where in somebody else's code an exception arose, to be put behind a verb; empty where that
    is not known."""
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        path, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        found = _place_of(path, line) or found
        traceback = traceback.tb_next
    return found


def line_of_frame(frame: FrameType | None) -> str:
    """Where the innermost of these frames is that somebody else's code has, as `line_of`."""
    while frame is not None:
        if found := _place_of(frame.f_code.co_filename, frame.f_lineno):
            return found
        frame = frame.f_back
    return ""


def _place_of(path: str, line: int) -> str:
    """A line of somebody else's code, to be put behind a verb; empty of other code."""
    if os.path.abspath(path).startswith(_NOT_THEIRS):
        return ""
    text = linecache.getline(path, line).strip()
    shown = f", `{text if len(text) <= 60 else text[:59] + '…'}`" if text else ""
    return f" at {os.path.basename(path)}:{line}{shown}"
