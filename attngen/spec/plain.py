"""Arguments of a call as plain Python values, whatever package their numbers come from.

Neither torch nor NumPy is imported: a spec is made from a call without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import layouts
from .masks import JOINT, joined
from .problem import LISTED

# What None stands for in arguments whose default is something else.
UNLESS_GIVEN: dict[str, Any] = {"window": (-1, -1), "mask": "none", "softcap": 0.0}
_LENGTHS = (
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("seqused_q", "seqused_kv"),
)
_PLAIN = frozenset((str, int, float, bool, type(None), tuple))
_MASK_OF_VARIANT = {"UPPER_LEFT": "causal", "LOWER_RIGHT": "causal_bottom_right"}


def differing(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `attention` that are not plain, as plain values: NumPy's numbers and arrays of
    one number as Python's, a window as a pair of ints, lists of masks and scores as one name, None
    as what it stands for."""
    found = {}
    for name, value in given.items():
        if value is None and name in UNLESS_GIVEN:
            found[name] = UNLESS_GIVEN[name]
        elif name == "mask" and (value := _one_mask(value)) is not given[name]:
            found[name] = value
        elif name == "score_mod" and isinstance(value, (list, tuple)) and value:
            found[name] = JOINT.join(map(str, value))
        elif name == "fragment_arguments" and value:
            plain = tuple((each, _plain_number(x)) for each, x in value)
            if any(new is not old for (_, new), (_, old) in zip(plain, value, strict=True)):
                found[name] = plain
        elif name == "window":
            window = _pair(value)
            if window is not value:
                found[name] = window
        elif value is None or (type(value) in _PLAIN and name != "positions"):
            continue
        elif name == "positions":
            if (places := _plain_numbers(value)) is not value:
                found[name] = places
        elif _is_number_of_another_package(value) and (x := _plain_number(value)) is not value:
            found[name] = x
    return found


def _plain_number(value: Any) -> Any:
    """A number of another package as Python's; anything else, and what Python has none of, as it
    is."""
    if not _is_number_of_another_package(value):
        return value
    number = value.item()
    return value if _is_number_of_another_package(number) else number


def is_on(condition: Any) -> bool:
    """Whether a condition holds, as a plain bool.

    A number that torch.compile traces may be a symbol, and so is what compares it, until it decides
    a branch.
    """
    if condition:
        return True
    return False  # noqa: SIM103


def causal_variant(value: object) -> str | None:
    """The mask that a `torch.nn.attention.bias.CausalBias` means; None of anything else. Such a
    tensor has sizes and a variant, and no numbers."""
    if not (hasattr(value, "variant") and hasattr(value, "seq_len_q")):
        return None
    return _MASK_OF_VARIANT.get(getattr(value.variant, "name", ""))


def is_mask_by_name(given: Mapping[str, Any], name: str, q: Any, k: Any, v: Any) -> bool:
    """Whether the CausalBias that a call has as its argument `name` is no more than a mask by its
    name: no other mask, no lengths and nothing else that depends on the diagonal are beside it."""
    bias, other = given[name], {"attn_mask": "bias", "bias": "attn_mask"}[name]
    masks = ("none",) if given.get("attn_mask") is not bias else ("none", "arbitrary")
    if (
        given.get("mask", "none") not in masks
        or given.get("window", (-1, -1)) != (-1, -1)
        or given.get("bias_type", "post_scale") == "alibi"
        or any(given.get(each) is not None for each in (*_LENGTHS, "bottom_right", "page_table"))
        or not (given.get("alibi_slopes") is None or given.get("alibi_slopes") is False)
        or (other == "attn_mask" and given.get(other) is not None)
    ):
        return False
    layout = layouts.parse(given.get("layout", "bshd"))
    layouts.check_operands(layout, q, k, v)
    if "thd" in layout.formats or layout.paged:
        return False
    shapes = layouts.shape_of(layout, "q", q, k), layouts.shape_of(layout, "k", q, k)
    lengths = (layouts.size(x, f, "s") for x, f in zip(shapes, layout.formats, strict=True))
    return (bias.seq_len_q, bias.seq_len_kv) == tuple(lengths)


def _one_mask(mask: Any) -> Any:
    """A list of masks as one name, and a name that joins several as the one that all orders have;
    itself where it is so, or no mask."""
    if isinstance(mask, (list, tuple)) and all(isinstance(each, str) for each in mask):
        return joined(mask)
    if isinstance(mask, str) and JOINT in mask and (name := joined([mask])) != mask:
        return name
    return mask


def _pair(window: Any) -> Any:
    """The window with sides of Python, in a tuple; itself where it is so, or has not two sides."""
    if type(window) is tuple and all([type(side) in (int, type(None)) for side in window]):
        return window
    if not hasattr(window, "requires_grad") and getattr(window, "shape", None) == (2,):
        return tuple(window.tolist())
    if not isinstance(window, (tuple, list)):
        return window
    return _plain_numbers(window)


def _plain_numbers(values: Any) -> Any:
    """A tuple or list of numbers as a tuple of Python's; itself where it is so, or no such."""
    if not isinstance(values, (tuple, list)):
        return values
    plain = tuple(map(_plain_number, values))
    unchanged = type(values) is tuple and all(map(_same, plain, values))
    return values if unchanged else plain


def _same(one: object, other: object) -> bool:
    return one is other


def _is_number_of_another_package(value: Any) -> bool:
    """Whether this is a NumPy number or an array of no axes, of whatever package but torch."""
    if type(value) in _PLAIN:
        return False
    if hasattr(value, "requires_grad"):  # a tensor of torch, which may not know its shape yet
        return False
    return getattr(value, "shape", None) == () and hasattr(value, "item")


def given_masks(arguments: Mapping[str, Any]) -> tuple[bool | str, bool]:
    """The field `mask_mod` of a call's spec, and whether it has booleans as `attn_mask`, which may
    be a mask of a mask_mod that was made before, int32."""
    mask = arguments.get("attn_mask")
    if mask is not None and "int32" in str(getattr(mask, "dtype", "")):
        return LISTED, False
    functions = (arguments.get(name) is not None for name in ("mask_mod", "block_mask"))
    return any(functions), mask is not None
