"""Functions that spec files name, as fields of specs: traced, without a GPU."""

from __future__ import annotations

import importlib
import inspect
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ....errors import SpecError
from ....fragments.features import register_program
from ....spec import layouts
from . import builtins
from .program import Traced, mask_program, score_program
from .trace import trace

_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}


def fields_of(field: str, word: str, folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec that a function stands for.

    field: `score_mod` or `mask_mod`. word: `FILE.py:NAME`, relative to the folder, or
    `PACKAGE.MODULE:NAME`; the name of a callable, or of a function without arguments that makes
    one. given: the spec's other fields. What it captures may be on the meta device, or of any size:
    kernels depend on dtypes, numbers of axes, and which of it require gradients.
    Raises: ValueError naming what is wrong.
    """
    mod = _function_of(word, folder)
    try:
        made = _traced(field, mod)
    except SpecError as error:
        raise ValueError(f"{word}: {error}") from error
    own = builtins.built_in_of(made, is_mask=field == "mask_mod")
    if field == "mask_mod":
        asked = None
        if own is not None:
            sequences = -1 if own.prefix is None else len(made.captures[own.prefix])
            asked = builtins.mask_arguments(own, made.captures, given, sequences)
        if asked is None:
            return _made_before(word, made, given)
        return {n: x if n == "mask" else True for n, x in asked.items() if n in ("mask", "window")}
    if own is not None and own.bias is not None:
        # Of whatever sizes, as those of calls that add a bias are theirs.
        table, dtype = made.sources[own.bias.capture], given.get("dtype", "bf16")
        plain = given.get("bias", "none") == "none" and not given.get("mask_mod", False)
        if plain and _DTYPES.get(str(table.dtype).removeprefix("torch.")) == dtype:
            return {"bias": "post_scale"}
    elif own is not None:
        axes = tuple(made.captures[own.alibi.capture].shape) if own.alibi else ()
        *_, b, h = (-1, -1, *axes)  # whatever they are: the call's are not known
        asked = builtins.score_arguments(own, made.sources, given, (b, h, -1, -1))
        if asked is not None:
            return {"alibi" if name == "alibi_slopes" else name: True for name in asked}
    return {"score_mod": register_program(made.program).name}


def _made_before(word: str, made: Traced, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a mask that no range stands for: made before the kernels, else booleans."""
    layout = layouts.parse(given.get("layout", "bshd"))
    beside = layout.masks_end_anywhere and given.get("attn_mask", False)
    if beside or given.get("kv_dtype") is not None:
        return {"attn_mask": True}
    if given.get("decode", False):
        raise ValueError(
            f"{word}: no call with such a mask_mod splits keys, however few its queries; leave "
            "decode out"
        )
    return {"mask_mod": register_program(made.program).name}


def _function_of(word: str, folder: Path) -> Any:
    """The callable of that name. Raises: ValueError."""
    place, colon, name = word.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(
            f"{word!r} is no function: write python:FILE.py:NAME or python:MODULE:NAME"
        )
    try:
        if place.endswith(".py"):
            space = runpy.run_path(str(folder / place))
        else:
            space = vars(importlib.import_module(place))
    except Exception as error:
        raise ValueError(f"{place} does not run: {type(error).__name__}: {error}") from error
    if name not in space:
        raise ValueError(f"{place} has no {name}")
    found = space[name]
    if not callable(found):
        raise ValueError(f"{word} is no function, but {type(found).__name__}")
    try:
        is_factory = not inspect.signature(found).parameters
    except (TypeError, ValueError):
        is_factory = False
    return found() if is_factory else found


def _traced(field: str, mod: Any) -> Traced:
    """The program of a function, of captured tensors on the CPU or on the meta device."""
    for device in map(torch.device, ("cpu", "meta")):
        try:
            graph = trace(field, mod, device)
            return score_program(graph, device) if field == "score_mod" else mask_program(graph)
        except (SpecError, RuntimeError) as error:
            last = error
    raise last if isinstance(last, SpecError) else SpecError(str(last))
