"""Fragments: which masks, scores, softmaxes … exist, read from the headers of their files.

A fragment is a file `templates/<axis>/<name>.cuh.j2`: a TOML header in the leading template
comment, then one macro `emit` that renders one struct. Dropping a file in is all it takes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..io.files import shipped, templates_dir
from ..io.values import from_data

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AXES = ("mask", "score", "softmax", "sequence", "fetch", "iteration")
DOMAINS = ("scalar", "head", "batch_head", "tile")
DTYPES = ("i32", "i64", "f32", "ptr", "q")
BOUNDS = ("left", "right")
TENSOR_AXES = ("score", "softmax")  # whose fragments may read tensors


@dataclass(frozen=True)
class Operand:
    """A run-time value that a fragment reads: by what it is indexed, and its dtype.

    Of domain `scalar` it is an argument of the launch; of `head` and `batch_head` an element of a
    float32 tensor of the call, [h_q] or [b, h_q], which the kernel reads once a tile. The
    fragment's struct has the value itself. Of `tile` it is element [i, j] of a broadcast of
    [b, h_q, s_q, s_kv] in Q's dtype, which a score is handed with its place. `score_power`: its
    dimension, as a power of that of scores, whose unit is the kernel's choice: 1 for what adds to
    them, -1 for what divides them.
    """

    name: str
    domain: str
    dtype: str
    doc: str
    score_power: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the tensor that holds it; none for an argument."""
        axes = {"head": ("head",), "batch_head": ("batch", "head")}
        return {**axes, "tile": ("batch", "head", "row", "column")}.get(self.domain, ())


@dataclass(frozen=True)
class Fragment:
    """The header of one fragment.

    `bounds` says on which sides a mask limits its rows, `past` that it hides whatever is past the
    diagonal; `selected_by` which field of a spec asks for it: `mask` by its name, or a switch such
    as `window`. `additive`: a score whose derivative is 1; `linear`: one
    that has a rate of change by the distance from the diagonal; `small`: one that grows with
    the score and is cheaper up to a limit; `scaled`: one so large, maybe, that it must meet scores
    in their own units: in those of products it might be infinite.
    """

    axis: str
    name: str
    doc: str
    struct: str
    bounds: tuple[str, ...]
    selected_by: str
    operands: tuple[Operand, ...]
    past: bool = False
    additive: bool = False
    linear: bool = False
    small: bool = False
    scaled: bool = False

    @property
    def template(self) -> str:
        return f"{self.axis}/{self.name}.cuh.j2"

    @property
    def reads_tile(self) -> bool:
        return any(operand.domain == "tile" for operand in self.operands)


Features = dict[str, dict[str, Fragment]]


def scan(root: Path | None = None) -> Features:
    """All fragments under `root` (the shipped templates by default): axis → name → Fragment.

    Where the package's templates were removed, what its wheel says of them.
    Raises: ValueError naming the file whose header is missing or wrong; FileNotFoundError.
    """
    if root is None and shipped() is not None:
        return _read_shipped()
    return _scan(root or templates_dir())


@cache
def _read_shipped() -> Features:
    axes = (shipped() or {})["features"]
    return {
        axis: {name: from_data(Fragment, data) for name, data in fragments.items()}
        for axis, fragments in axes.items()
    }


@cache
def _scan(root: Path) -> Features:
    found: Features = {axis: {} for axis in AXES}
    for axis in AXES:
        for path in sorted((root / axis).glob("*.cuh.j2")):
            fragment = read_header(path, axis)
            found[axis][fragment.name] = fragment
    return found


def read_header(path: Path, axis: str) -> Fragment:
    """The fragment that the file at `path` declares."""
    text = path.read_text(encoding="utf-8")
    head, closed, _ = text.removeprefix("<#").partition("#>")
    if not text.startswith("<#") or not closed:
        raise ValueError(f"{path}: a fragment starts with its TOML header between <# and #>")
    try:
        data: dict[str, Any] = tomllib.loads(head)
        operands = tuple(Operand(**item) for item in data.pop("operand", []))
        bounds = data.pop("bounds", [])
        fragment = Fragment(
            axis=axis,
            bounds=tuple(bounds),
            selected_by=data.pop("selected_by", axis),
            operands=operands,
            **data,
        )
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if fragment.template != f"{axis}/{path.name}":
        raise ValueError(f"{path}: the header's name is {fragment.name!r}, not the file's")
    if reasons := [*_bound_mistakes(axis, bounds), *_operand_mistakes(axis, operands)]:
        raise ValueError(f"{path}: " + "; ".join(reasons))
    return fragment


def _bound_mistakes(axis: str, bounds: Any) -> list[str]:
    """A mask whose bounds are not declared would be skipped by the skeleton's loops."""
    if axis != "mask":
        return ["only masks have bounds"] if bounds else []
    if not isinstance(bounds, list) or not bounds or not set(bounds) <= set(BOUNDS):
        return [f"bounds = {bounds!r}; a mask names the sides it limits: some of {list(BOUNDS)}"]
    return []


def _operand_mistakes(axis: str, operands: tuple[Operand, ...]) -> list[str]:
    mistakes = []
    for operand in operands:
        if operand.domain not in DOMAINS:
            mistakes.append(f"operand {operand.name}: domain {operand.domain!r}, known: {DOMAINS}")
        if operand.dtype not in DTYPES:
            mistakes.append(f"operand {operand.name}: dtype {operand.dtype!r}, known: {DTYPES}")
        if operand.axes and operand.dtype != ("q" if operand.domain == "tile" else "f32"):
            wanted = "those of a tile q" if operand.domain == "tile" else "f32"
            mistakes.append(f"operand {operand.name}: a tensor's elements are {wanted}")
        if operand.dtype == "q" and operand.domain != "tile":
            mistakes.append(f"operand {operand.name}: only a tile has Q's dtype")
        if operand.domain == "tile" and axis != "score":
            mistakes.append(f"operand {operand.name}: only scores read tiles")
        if operand.score_power and (operand.score_power not in (-1, 1) or axis != "score"):
            mistakes.append(f"operand {operand.name}: score_power is 1 or -1, of a score")
        if operand.axes and axis not in TENSOR_AXES:
            mistakes.append(f"operand {operand.name}: only {TENSOR_AXES} read tensors")
    if sum(operand.domain == "tile" for operand in operands) > 1:
        mistakes.append("a score reads one tile at most")
    return mistakes
