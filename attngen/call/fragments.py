"""Arguments that fragments add to a call: which there are, and where operations take them.

A mask or a score that a call names has its operands passed under their names. Operations take
tensors in the places `SLOTS`, and numbers as words of one text, since AOTInductor hands over no
list of them, both in the order of the call's fragments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..fragments.definition import MASK_NAMES, SCORE_NAMES
from ..fragments.features import scan
from ..fragments.header import CAPTURED, PREFIX, Fragment, Operand
from ..spec.attention_spec import AttentionSpec
from ..spec.fragment_checks import MOST_TENSORS, called_fragments, mask_names
from ..spec.masks import PLAIN_MASKS, masks_of
from .other_names import meant_by

KNOWN = scan()  # here, not in a call: torch.compile cannot trace file access
SLOTS = tuple(f"fragment_{place}" for place in range(MOST_TENSORS))
"""Names of the operations' tensors that hold operands of fragments."""
LEARNED_SLOT = "fragment_learned"
"""The operations' tensor whose gradient has those of all that a score learns."""
LEARNED = "learned_captures"
_INT32 = 1 << 31
_LEARNED = Operand(
    LEARNED,
    CAPTURED,
    "i64",
    "Stands for what a score learns: its gradient has theirs, and no kernel reads it.",
    rank=1,
    element="float32",
)


@dataclass(frozen=True)
class FragmentOperand:
    """An operand of a fragment that a call names.

    slot: the operations' tensor that may hold it, empty where none may. number: its place among
    the operations' numbers, −1 where none stands for it.
    """

    fragment: Fragment
    operand: Operand
    slot: str
    number: int

    @property
    def name(self) -> str:
        """The argument's name."""
        return self.operand.name

    @property
    def parameter(self) -> str:
        """The name of the kernels' parameter."""
        return PREFIX + self.operand.name

    @property
    def shapes(self) -> tuple[tuple[str, ...], ...]:
        """Axes of the tensors that a call may pass."""
        of_domain: dict[str, tuple[tuple[str, ...], ...]] = {
            "sequence": (("b",),),
            "head": (("h_q",),),
            "batch_head": (("h_q",), ("b", "h_q")),
        }
        return of_domain.get(self.operand.domain, ())


def argument_names() -> set[str]:
    """Every argument that some fragment adds."""
    called = (each for axis in KNOWN.values() for each in axis.values() if each.called)
    return {_LEARNED.name, *(operand.name for each in called for operand in each.operands)}


def split_arguments(
    function: str, rows: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """The arguments that the table has, and those that fragments add, None left out.

    Raises: TypeError, as Python does, where the function has no argument of a name.
    """
    unknown = [name for name in given if name not in rows]
    if not unknown:
        return dict(given), ()
    added = argument_names()
    for name in unknown:
        if name not in added:
            meant = meant_by(name, (*rows, *added))
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")
    own = {name: x for name, x in given.items() if name in rows}
    return own, tuple((name, given[name]) for name in unknown if given[name] is not None)


def fragments_of(mask: object, score_mod: object) -> tuple[Fragment, ...]:
    """The fragments that a call names, in the order in which kernels have them, but for a causal
    mask alone."""
    if not isinstance(mask, str) or (mask in PLAIN_MASKS and not isinstance(score_mod, str)):
        return ()
    named = score_mod if isinstance(score_mod, str) and score_mod else False
    return called_fragments(AttentionSpec(head_dim=1, mask=mask, score_mod=named), KNOWN)


def operands_of(mask: object, score_mod: object) -> tuple[FragmentOperand, ...]:
    """The operands of the fragments that a call names, with their places."""
    if mask in PLAIN_MASKS and not score_mod:
        return ()
    found: list[FragmentOperand] = []
    slots, numbers = 0, 0
    for fragment in fragments_of(mask, score_mod):
        for operand in fragment.operands:
            held = bool(operand.axes)
            counted = operand.domain in ("scalar", "sequence")
            slot = SLOTS[slots] if held and slots < len(SLOTS) else ""
            found.append(FragmentOperand(fragment, operand, slot, numbers if counted else -1))
            slots, numbers = slots + held, numbers + counted
        if fragment.learned:
            found.append(FragmentOperand(fragment, _LEARNED, LEARNED_SLOT, -1))
    return tuple(found)


def slot_tensors(
    operands: Iterable[FragmentOperand], given: Mapping[str, Any], tensor_type: type
) -> dict[str, Any]:
    """The tensors of a call by the operations' names for them."""
    return {
        each.slot: given[each.name]
        for each in operands
        if each.slot and isinstance(given.get(each.name), tensor_type)
    }


def numbers_of(
    operands: Iterable[FragmentOperand], given: Mapping[str, Any], tensor_type: type
) -> str:
    """The operations' numbers of a checked call; 0 where a tensor holds them."""
    words = []
    for each in operands:
        value = given.get(each.name, 0)
        if each.number >= 0:
            number = 0 if isinstance(value, tensor_type) else value
            number = float(number) if each.operand.dtype == "f32" else int(number)
            words.append(f"{number}")  # which a trace makes of a symbol, unlike str()
    return " ".join(words)


def given_by(
    operands: Iterable[FragmentOperand], tensors: Mapping[str, Any], numbers: str
) -> tuple[tuple[str, Any], ...]:
    """The arguments of a call that the operations' tensors and numbers stand for."""
    found: list[tuple[str, Any]] = []
    for each in operands:
        tensor = tensors.get(each.slot)
        if tensor is not None:
            found.append((each.name, tensor))
        elif each.number >= 0:
            found.append((each.name, as_number(each.operand, numbers.split()[each.number])))
    return tuple(found)


def as_number(operand: Operand, word: str) -> int | float:
    """A number in the type that an operand has. Raises: ValueError where the word is none."""
    return float(word) if operand.dtype == "f32" else int(word)


def definition_of(
    fragment: Fragment, functions: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The function of a fragment's definition, of keyword arguments alone: positions i and j as
    tensors, delta, q_len and kv_len as numbers or tensors, of a score `score`, and the operands.

    functions: those of `fragments.definition.FUNCTIONS`, as a library of tensors has them.

    Raises: SpecError where its header has none.
    """
    if fragment.reference is None:
        raise SpecError(
            f"{fragment.axis} {fragment.name!r} has no definition for the reference: add "
            '`reference = "…"` to its header, or run it on kernels'
        )
    first = MASK_NAMES if fragment.axis == "mask" else SCORE_NAMES
    names = (*first, *(operand.name for operand in fragment.operands))
    # An expression of names, operators and these functions alone, which its header's check makes
    # sure of (fragments/definition.py).
    text = f"lambda *, {', '.join(names)}: ({fragment.reference.strip()}\n)"
    made: Callable[..., Any] = eval(text, {**functions, "__builtins__": {}})
    return made


def is_mask(mask: object) -> bool:
    """Whether this is a mask's name, or joins those of some."""
    known = mask_names(KNOWN)
    return isinstance(mask, str) and all(word in known for word in masks_of(mask).fragments)


def no_mask(mask: object) -> str:
    """Say that a mask is none, and what may be one."""
    others = [name for name in mask_names(KNOWN) if name not in PLAIN_MASKS]
    return f"mask={mask!r} is not a mask. Use one of {', '.join((*PLAIN_MASKS, *others))}."


def misplaced(name: str) -> str:
    """Say to which fragments an argument belongs, none of which a call names."""
    owners = [
        f"mask={each.name!r}" if each.axis == "mask" else f"score_mod={each.name!r}"
        for fragments in KNOWN.values()
        for each in fragments.values()
        if each.called and name in [operand.name for operand in each.operands]
    ]
    return f"{name} belongs to {' or '.join(owners)}; pass that, or leave {name} out."


def number_wanted(operand: Operand) -> str:
    """The numbers that an operand may be, in words."""
    kind = "a number" if operand.dtype == "f32" else "an int"
    return kind if operand.minimum is None else f"{kind} >= {operand.minimum}"


def is_number(value: object, operand: Operand) -> bool:
    """Whether this is a number that an operand may be."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if operand.dtype != "f32" and not isinstance(value, int):
        return False
    if operand.dtype == "i32" and not -_INT32 <= value < _INT32:
        return False
    return operand.minimum is None or value >= operand.minimum
