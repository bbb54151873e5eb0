"""Variants of attention: TransformerEngine's words and tensors as attngen's arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import SpecError
from ...spec.layouts import parse, size
from .names import AttnBiasType, AttnMaskType, SoftmaxType

BIAS_TYPES = {"pre_scale_bias": "pre_scale", "post_scale_bias": "post_scale"}
Tensors = dict[str, "Tensor | None"]


@dataclass(frozen=True)
class Variant:
    """A call but for its tensors, in attngen's words.

    window: keys before and after the diagonal, −1 for all, (−1, −1) where a causal mask alone ends
    it. bottom_right: whether the last query sees as far as the last key.
    """

    layout: str
    mask: str
    window: tuple[int, int]
    bottom_right: bool
    softmax: str
    bias_type: str = "post_scale"
    softmax_scale: float | None = None
    dropout_p: float = 0.0

    def for_attention(self) -> dict[str, Any]:
        """Arguments of `attngen.attention`."""
        return dict(
            layout=self.layout,
            mask=self.mask,
            window=self.window,
            bottom_right=self.bottom_right,
            softmax=self.softmax,
            bias_type=self.bias_type,
            softmax_scale=self.softmax_scale,
            dropout_p=self.dropout_p,
        )

    def for_operation(self) -> dict[str, Any]:
        """Arguments of `torch.ops.attngen.backward`, and of the reference's."""
        given = self.for_attention()
        left, right = given.pop("window")
        return given | {"window_left": left, "window_right": right}


_PLAIN: dict[str, Any] = {
    "layout": "bshd_bshd_bshd",
    "mask": "none",
    "window": (-1, -1),
    "bottom_right": False,
    "softmax": "vanilla",
    "bias_type": "post_scale",
    "dropout_p": 0.0,
    "backend": "auto",
    "return_rng_state": False,
    "return_max_logit": False,
}


def said(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `attngen.attention` but for those that say what is so anyway, each of which a
    call would pay for."""
    if torch.compiler.is_compiling():  # numbers may be symbols
        return given
    return {name: x for name, x in given.items() if x != _PLAIN.get(name)}


def mask_of(name: str) -> str:
    """A mask's name with one spelling. Raises: KeyError where there is none."""
    name = name.replace(",", "_")
    if name == "causal_padding":
        name = "padding_causal"
    if name != "arbitrary":
        AttnMaskType[name]
    return name


def variant_of(
    layout: str,
    mask: str,
    window: tuple[int, int] | None,
    bottom_right: bool | None,
    softmax: str,
    bias: str,
) -> Variant:
    """The variant of these words. bottom_right: None asks the mask's name.

    Raises: KeyError for a word that there is not.
    """
    AttnBiasType[bias], SoftmaxType[softmax]
    mask = mask_of(mask)
    if bottom_right is None:
        bottom_right = mask.endswith("bottom_right")
    left, right = (-1, -1) if window is None else window
    if "causal" in mask and left < 0:
        right = -1  # no more than the mask says
    mask = mask.removesuffix("_bottom_right")
    return Variant(
        layout=layout,
        mask="none" if mask == "no_mask" else mask,
        window=(left, right),
        bottom_right=bottom_right,
        softmax="vanilla" if softmax == "vanilla" else "learnable",
        bias_type=BIAS_TYPES.get(bias, "post_scale"),
    )


Maker = Callable[[Any], Any]


class Read(NamedTuple):
    """An argument of attngen's, the argument of a call that it is made of, and by what; None where
    it is that one."""

    argument: str
    source: str
    make: Maker | None = None

    def of(self, value: Any) -> Any:
        """The argument, for this value of its source."""
        return value if self.make is None else self.make(value)


def length_reads(
    layout: str, padding: bool, batch: int | None, present: Collection[str]
) -> list[Read]:
    """The lengths that a layout needs, as attngen's operations take them, of cumulative ones.

    padding: whether dense sequences have lengths of their own; batch: how many of those that the
    cumulative lengths may have room for there are, None for all; present: arguments that there are.
    Raises: SpecError where one is missing.
    """
    parsed = parse(layout)
    found = []
    gaps = any(f"cu_seqlens_{side}_padded" in present for side in ("q", "kv"))
    for side, axes in (("q", parsed.q_format), ("kv", parsed.kv_format)):
        ends = f"cu_seqlens_{'q' if parsed.one_length else side}"
        packed = axes == "thd"
        if not (packed or padding or (parsed.paged and side == "kv")):
            continue
        if ends not in present:
            raise SpecError(f"{ends} is needed by layout {layout!r} or its padding; got None")
        if not packed:
            found.append(Read(f"seqused_{side}", ends, partial(_used, batch)))
            continue
        cut = None if batch is None else partial(_first, batch)
        found.append(Read(f"cu_seqlens_{side}", ends, cut))
        if gaps:
            starts = f"{ends}_padded" if f"{ends}_padded" in present else ends
            found.append(Read(f"cu_seqlens_{side}_padded", starts, cut))
    return found


def _first(batch: int, ends: Tensor) -> Tensor:
    """Cumulative lengths of so many sequences."""
    return ends if ends.shape[0] == batch + 1 else ends[: batch + 1]


def _used(batch: int | None, ends: Tensor) -> Tensor:
    return (ends if batch is None else _first(batch, ends)).diff()


def as_sink(offset: Tensor) -> Tensor:
    """Sinks as attngen takes them, float32 [h]."""
    if offset.ndim == 1 and offset.dtype == torch.float32:
        return offset
    return offset.reshape(-1).float()


def batch_of(layout: str, q: Tensor, k: Tensor, page_table: Tensor | None = None) -> int | None:
    """How many sequences a call has; None where packed tokens alone say it."""
    parsed = parse(layout)
    if parsed.q_format != "thd":
        return size(q.shape, parsed.q_format, "b")
    if page_table is not None:
        return page_table.shape[0]
    return None if parsed.kv_format == "thd" else size(k.shape, parsed.kv_format, "b")


def refuse_fp8(what: str, given: bool) -> None:
    """Raises: SpecError where a backend's module is asked for FP8 by an argument."""
    if given:
        raise SpecError(
            f"{what}: backends follow attngen.fp8.autocast; quantizers go to fused_attn_fwd"
        )
