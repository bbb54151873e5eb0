"""Fragments in a kernel: in which role, and by which of its parameters they are filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..fragments.features import Features, Fragment, program_named, register_programs
from ..fragments.header import CAPTURED, PREFIX
from ..fragments.mask_lowering import asked_fragment_of
from ..fragments.program import MASK_PREFIX
from ..spec.problem import TOKEN_SCALES, Problem


@dataclass(frozen=True)
class FragmentUse:
    """A fragment in a kernel: the names of the parameters that fill its struct, in order."""

    fragment: Fragment
    fields: tuple[str, ...]

    @property
    def parameters(self) -> Iterator[tuple[str, str]]:
        """Names and types of the kernel's parameters: of a tensor its address and strides, of one
        that is read in tiles its sizes, too; of a number of each sequence the one of all, for
        calls without a tensor."""
        for name, operand in zip(self.fields, self.fragment.operands, strict=True):
            tile = operand.domain == "tile"
            yield name, "ptr" if operand.axes else operand.dtype
            if operand.domain == "sequence":
                yield f"{name}_of_all", operand.dtype
            stride = "i64" if tile else "i32"
            stride = operand.dtype if operand.domain == CAPTURED else stride
            yield from ((f"{name}_stride_{axis}", stride) for axis in operand.axes)
            if operand.domain == CAPTURED:
                yield from ((f"{name}_size_{axis}", "i32") for axis in operand.axes)
            else:
                yield from ((f"{name}_{axis}s", "i32") for axis in operand.axes[2:])

    @property
    def reads_tensors(self) -> bool:
        return any(operand.axes for operand in self.fragment.operands if operand.domain != "tile")

    @property
    def tile(self) -> str | None:
        """The parameter that holds the address of the tensor that is read in tiles."""
        operands = zip(self.fields, self.fragment.operands, strict=True)
        return next((name for name, operand in operands if operand.domain == "tile"), None)

    @property
    def tile_power(self) -> int:
        """The dimension of what is read in tiles, as a power of that of scores."""
        operands = self.fragment.operands
        return next((each.score_power for each in operands if each.domain == "tile"), 0)

    @property
    def score_powers(self) -> tuple[int, ...]:
        return tuple(operand.score_power for operand in self.fragment.operands)

    @property
    def bounds_left(self) -> bool:
        return "left" in self.fragment.bounds

    @property
    def bounds_right(self) -> bool:
        return "right" in self.fragment.bounds


def uses_of(problem: Problem, features: Features) -> dict[str, list[FragmentUse]]:
    """The fragments of each role; those that serve a role twice prefix their parameters, and so do
    those whose operands are arguments of calls, under whatever names."""

    def use(axis: str, name: str, prefix: str = "") -> FragmentUse:
        if name not in features[axis]:
            register_programs(problem.fragment_digests)
        fragment = features[axis][name]
        start = PREFIX if fragment.called else prefix
        return FragmentUse(fragment, tuple(start + operand.name for operand in fragment.operands))

    def asked(name: str) -> FragmentUse:
        use("mask", name)  # which makes it known
        program = program_named(name)
        assert program is not None
        return FragmentUse(asked_fragment_of(program), ())

    traced = [name for name in problem.masks if name.startswith(MASK_PREFIX) and problem.asks_mask]
    return {
        "mask": [use("mask", name) for name in problem.masks if name not in traced],
        "asked": [asked(name) for name in traced],
        "score": [use("score", name) for name in problem.scores],
        "softmax": [use("softmax", problem.softmax)],
        "q_seq": [use("sequence", problem.q_seq, "q_")],
        "kv_seq": [use("sequence", problem.kv_seq, "kv_")],
        "q_fetch": [use("fetch", "gather" if problem.gather else "tma")],
        "kv_fetch": [use("fetch", problem.kv_fetch, "k_")],
        "v_fetch": [use("fetch", problem.kv_fetch, "v_")],
        "kv_iter": [use("iteration", problem.kv_iter)],
    }


def hides_past(masks: Iterable[FragmentUse]) -> str:
    """C++: whether a mask hides whatever is past the diagonal."""
    return "true" if any(use.fragment.past for use in masks) else "false"


def lines_of(scores: Sequence[FragmentUse]) -> tuple[int, ...]:
    """Numbers of a key and of a distance that a kernel may keep for its scores; none where no score
    is of a callable."""
    return next((use.fragment.lines for use in scores if use.fragment.lines), ())


def place_of(
    scores: Sequence[FragmentUse],
    masks: Iterable[FragmentUse],
    *,
    keeps_lines: bool,
    derives: bool = False,
) -> str:
    """C++: what fragments are told of an element. derives: whether derivatives are asked for, as
    programs want to know."""
    hides = hides_past(masks)
    if derives and any(use.fragment.program for use in scores):
        return f"DerivedPlace<{hides}>"
    if keeps_lines:
        return f"LinedPlace<{hides}, {', '.join(map(str, lines_of(scores)))}>"
    return f"ScaledPlace<{hides}>" if scores[0].fragment.name == TOKEN_SCALES else f"Place<{hides}>"
