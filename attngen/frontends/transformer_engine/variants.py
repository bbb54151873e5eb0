"""Variants of attention: TransformerEngine's words and tensors as attngen's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, eq=False)
class SideLengths:
    """Lengths of the sequences of one side: cumulative ones, int32 [b + 1], and where the sequences
    of packed tokens begin."""

    cu_seqlens: Tensor | None
    padded: Tensor | None = None


def lengths_of(
    layout: str, padding: bool, batch: int | None, q: SideLengths, kv: SideLengths
) -> Tensors:
    """The lengths that a call's layout needs, as attngen's operations take them.

    padding: whether dense sequences have lengths of their own; batch: how many of those that the
    cumulative lengths may have room for there are, None for all.
    """
    parsed = parse(layout)
    found: Tensors = {}
    kv = q if parsed.one_length else kv
    sides = (("q", parsed.q_format, q), ("kv", parsed.kv_format, kv))
    gaps = _has_gaps(q) or _has_gaps(kv)
    for side, axes, given in sides:
        ends = given.cu_seqlens
        if ends is not None and batch is not None:
            ends = ends[: batch + 1]
        if axes == "thd":
            found[f"cu_seqlens_{side}"] = ends
            starts = given.padded if given.padded is not None else ends
            if gaps and starts is not None:
                starts = starts if batch is None else starts[: batch + 1]
                found[f"cu_seqlens_{side}_padded"] = starts
        elif padding or parsed.paged and side == "kv":
            if ends is None:
                raise SpecError(f"cu_seqlens_{side} is needed by a padding mask; got None")
            found[f"seqused_{side}"] = ends.diff()
    return found


def _has_gaps(side: SideLengths) -> bool:
    return side.padded is not None and side.padded is not side.cu_seqlens


def batch_of(layout: str, q: Tensor, k: Tensor, page_table: Tensor | None = None) -> int | None:
    """How many sequences a call has; None where packed tokens alone say it."""
    parsed = parse(layout)
    if parsed.q_format != "thd":
        return size(q.shape, parsed.q_format, "b")
    if page_table is not None:
        return page_table.shape[0]
    return None if parsed.kv_format == "thd" else size(k.shape, parsed.kv_format, "b")


def refuse_fp8(what: str, given: bool) -> None:
    """Raises: SpecError where an 8-bit argument is given, of which there are no calls yet."""
    if given:
        raise SpecError(
            f"{what}: attngen.te has 16-bit calls alone; attngen.attention has an FP8 forward"
        )
