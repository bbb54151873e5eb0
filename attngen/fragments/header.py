"""Headers of fragments: what one file says of the mask, score, softmax … that it holds."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import definition

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AXES = ("mask", "score", "softmax", "sequence", "fetch", "iteration")
CALLED_AXES = ("mask", "score")  # whose fragments calls may name, and users may have of their own
DOMAINS = ("scalar", "sequence", "head", "batch_head", "tile")
CAPTURED = "captured"  # the domain of tensors that traced callables read, which no file has
DTYPES = ("i32", "i64", "f32", "ptr", "q")
BOUNDS = ("left", "right")
SUFFIX = ".cuh.j2"
PREFIX = "arg_"  # of parameters that hold arguments of calls, which no other parameter begins with
# Names that a mask or a spec means something else by.
RESERVED = ("none", "arbitrary", "padding", "padding_causal")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DIGEST_CHARACTERS = 16  # hex: 64 bits
# Domain of an operand → the axes of the tensor that holds it.
_TENSOR_AXES = {
    "scalar": (),
    "sequence": ("batch",),
    "head": ("head",),
    "batch_head": ("batch", "head"),
    "tile": ("batch", "head", "row", "column"),
}


@dataclass(frozen=True)
class Operand:
    """A run-time value that a fragment reads: by what it is indexed, and its dtype.

    Of domain `scalar` it is an argument of the launch; of `head` and `batch_head` an element of a
    float32 tensor of the call, [h_q] or [b, h_q], which the kernel reads once a tile; of `sequence`
    an element of an int32 tensor [b], or one number for all sequences. The fragment's struct has
    the value itself. Of `tile` it is element [i, j] of a broadcast of [b, h_q, s_q, s_kv] in Q's
    dtype, which a score is handed with its place. `score_power`: its dimension, as a power of that
    of scores, whose unit is the kernel's choice: 1 for what adds to them, -1 for what divides them.
    `minimum`: the least number that a call may pass; None for any. Of domain `captured` it is a
    tensor of any sizes that a traced callable reads where it likes: of so many axes, `rank`, and a
    dtype, `element`, as torch calls it; `dtype` is that of its strides.
    """

    name: str
    domain: str
    dtype: str
    doc: str
    score_power: int = 0
    minimum: int | None = None
    rank: int = 0
    element: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the tensor that holds it; none for an argument of the launch."""
        if self.domain == CAPTURED:
            return tuple(map(str, range(self.rank)))
        return _TENSOR_AXES[self.domain]


@dataclass(frozen=True)
class Fragment:
    """The header of one fragment.

    `bounds` says on which sides a mask limits its rows, `past` that it hides whatever is past the
    diagonal; `steady` that no end of its range moves by more than a position from one query to the
    next, so that the queries of a tile differ in few keys; `alone` that no other mask of a list
    stands beside it. `selected_by` says which field of a spec asks for a fragment: by its name that
    of its axis, or a switch such as `window`, or a field of which `choice` is the value that does.
    `order`: a score's place among those of a problem, smaller ones first; scores that calls name
    have 0, and apply in the call's order. `additive`: a score whose derivative is 1; `linear`:
    one that has a rate of change by the distance from the diagonal; `small`: one that grows with
    the score and is cheaper up to a limit; `scaled`: one so large, maybe, that it must meet scores
    in their own units: in those of products it might be infinite. `reference`: the definition in
    Python that the reference applies. `text`: the whole file, of a fragment that is not among
    attngen's templates. `program`: that of a callable, of which it is made; `learned`: of the
    tensors that it reads, by their places, those that have gradients; `reaches`: of each load of
    theirs which elements of a tile read the same number, as learned_sums.cuh names it; `lines`: how
    many numbers of a key, and of a distance, kernels may keep for it; `learned_lines`: the same
    with those of what it learns; `turned_lines`: how many of a query, and of a distance.
    """

    axis: str
    name: str
    doc: str
    struct: str
    bounds: tuple[str, ...]
    selected_by: str
    operands: tuple[Operand, ...]
    choice: str = ""
    order: int = 0
    past: bool = False
    steady: bool = False
    additive: bool = False
    linear: bool = False
    small: bool = False
    scaled: bool = False
    alone: bool = False
    reference: str | None = None
    text: str | None = None
    program: str = ""
    learned: tuple[int, ...] = ()
    reaches: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    learned_lines: tuple[int, ...] = ()
    turned_lines: tuple[int, ...] = ()

    @property
    def template(self) -> str:
        return f"{self.axis}/{self.name}{SUFFIX}"

    @property
    def called(self) -> bool:
        """Whether a call asks for it by its name, and passes its operands under theirs."""
        return self.axis in CALLED_AXES and self.selected_by == self.axis

    @property
    def switch(self) -> str | bool:
        """The value of the field `selected_by` that asks for it, where calls do not name it."""
        return self.choice or True

    @property
    def traced(self) -> bool:
        """Whether it comes from a callable."""
        return bool(self.program)

    @property
    def digest(self) -> str | None:
        """Hash of its text, which tells it from others of its name, or the program that it is made
        of; None of attngen's own fragments, whose files are part of keys by themselves."""
        if self.text is None or self.program:
            return self.program or None
        return hashlib.sha256(self.text.encode()).hexdigest()[:_DIGEST_CHARACTERS]

    @property
    def reads_tile(self) -> bool:
        return any(operand.domain == "tile" for operand in self.operands)

    @property
    def reads_sequences(self) -> bool:
        """Whether an operand is a number of each sequence."""
        return any(operand.domain == "sequence" for operand in self.operands)


def read_header(path: Path, axis: str) -> Fragment:
    """The fragment of an axis that the file at `path` declares. Raises: ValueError."""
    return parse_header(path.read_text(encoding="utf-8"), path, axis)


def parse_header(text: str, path: Path, axis: str | None = None) -> Fragment:
    """The fragment that a file's text declares. path: names the file in errors, and says its name.

    axis: the fragment's; None where the header says it, else the name of the file's folder.
    Raises: ValueError with everything that is wrong with it.
    """
    head, closed, _ = text.removeprefix("<#").partition("#>")
    if not text.startswith("<#") or not closed:
        raise ValueError(f"{path}: a fragment starts with its TOML header between <# and #>")
    try:
        data: dict[str, Any] = tomllib.loads(head)
        operands = tuple(Operand(**item) for item in data.pop("operand", []))
        bounds = data.pop("bounds", [])
        if "text" in data:
            raise TypeError("text is the file's own, and no header has it")
        said = data.pop("axis", axis or path.parent.name)
        if said not in ((axis,) if axis else CALLED_AXES):
            wanted = repr(axis) if axis else " or ".join(map(repr, CALLED_AXES))
            raise TypeError(f"axis = {said!r}, needs {wanted}")
        axis = str(said)
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
    if reasons := [
        *_bound_mistakes(axis, bounds),
        *_operand_mistakes(axis, operands),
        *_call_mistakes(fragment),
    ]:
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
    dtypes = {"tile": "q", "sequence": "i32", "head": "f32", "batch_head": "f32"}
    # A list of masks is made where no head is known.
    domains = {"mask": ("scalar", "sequence"), "score": DOMAINS,
               "softmax": ("scalar", "head", "batch_head")}.get(axis, ("scalar",))  # fmt: skip
    for operand in operands:
        whose = f"operand {operand.name}"
        if operand.domain not in DOMAINS:
            mistakes.append(f"{whose}: domain {operand.domain!r}, known: {DOMAINS}")
            continue
        if operand.dtype not in DTYPES:
            mistakes.append(f"{whose}: dtype {operand.dtype!r}, known: {DTYPES}")
        if operand.axes and operand.dtype != dtypes[operand.domain]:
            wanted = dtypes[operand.domain]
            mistakes.append(f"{whose}: a tensor's elements are {wanted}, of {operand.domain}")
        if operand.dtype == "q" and operand.domain != "tile":
            mistakes.append(f"{whose}: only a tile has Q's dtype")
        if operand.domain not in domains:
            wanted = f"a {axis} reads none but {domains}"
            mistakes.append(f"{whose}: domain {operand.domain!r}, {wanted}")
        if operand.score_power and (operand.score_power not in (-1, 1) or axis != "score"):
            mistakes.append(f"{whose}: score_power is 1 or -1, of a score")
        if operand.minimum is not None and type(operand.minimum) is not int:
            mistakes.append(f"{whose}: minimum is an integer")
    if sum(operand.domain == "tile" for operand in operands) > 1:
        mistakes.append("a score reads one tile at most")
    return mistakes


def _call_mistakes(fragment: Fragment) -> list[str]:
    """Faults that keep a call from naming a fragment, and from passing its operands."""
    mistakes = []
    if fragment.alone and fragment.axis != "mask":
        mistakes.append("only masks stand alone")
    if type(fragment.order) is not int or (fragment.order and fragment.axis != "score"):
        mistakes.append("order is an integer, of a score")
    if fragment.called and (fragment.order or fragment.choice):
        mistakes.append("order and choice are of fragments that a field of a spec asks for")
    if fragment.called:
        names = [fragment.name, *(operand.name for operand in fragment.operands)]
        mistakes += [f"name {name!r} is no name in small letters, digits and _"
                     for name in names if not _NAME.fullmatch(str(name))]  # fmt: skip
        if fragment.name in RESERVED or fragment.name.endswith("_bottom_right"):
            mistakes.append(f"name {fragment.name!r} means something else; choose another")
        if len(set(names[1:])) < len(names[1:]):
            mistakes.append("several operands have one name")
        for operand in fragment.operands:
            if operand.dtype not in ("i32", "i64", "f32") or operand.domain == "tile":
                what = f"a call passes no {operand.dtype} of domain {operand.domain!r} but its bias"
                mistakes.append(f"operand {operand.name}: {what}")
    if fragment.reference is not None:
        if fragment.axis not in CALLED_AXES:
            return [*mistakes, "reference is of masks and scores"]
        known = definition.MASK_NAMES if fragment.axis == "mask" else definition.SCORE_NAMES
        own = tuple(operand.name for operand in fragment.operands)
        mistakes += definition.mistakes_of(fragment.reference, (*known, *own))
    return mistakes
