"""Names of TransformerEngine's JAX package: masks, biases, softmaxes, layouts, strategies."""

from __future__ import annotations

from enum import Enum

from ...errors import SpecError


class AttnBiasType(Enum):
    """Where a bias is added: nowhere, before or after the scale."""

    NO_BIAS = "no_bias"
    PRE_SCALE_BIAS = "pre_scale"
    POST_SCALE_BIAS = "post_scale"


class AttnMaskType(Enum):
    """Masks, whose values are attngen's names of them."""

    NO_MASK = "none"
    PADDING_MASK = "padding"
    CAUSAL_MASK = "causal"
    PADDING_CAUSAL_MASK = "padding_causal"
    CAUSAL_BOTTOM_RIGHT_MASK = "causal_bottom_right"
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = "padding_causal_bottom_right"

    def is_causal(self) -> bool:
        """Whether queries see no later keys."""
        return "CAUSAL" in self.name

    def is_padding(self) -> bool:
        """Whether sequences have lengths of their own."""
        return "PADDING" in self.name

    def is_bottom_right(self) -> bool:
        """Whether the last query sees as far as the last key."""
        return "BOTTOM_RIGHT" in self.name


class AttnSoftmaxType(Enum):
    """Softmaxes, whose values are attngen's names of them."""

    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off_by_one"
    LEARNABLE_SOFTMAX = "learnable"

    @classmethod
    def from_str(cls, softmax_type: str) -> AttnSoftmaxType:
        """The softmax of a name. Raises: SpecError, a ValueError, where there is none."""
        for each in cls:
            if each.value == softmax_type:
                return each
        known = ", ".join(each.value for each in cls)
        raise SpecError(f"softmax_type={softmax_type!r} is not a softmax. Use one of {known}.")


class QKVFormat(Enum):
    """Orders of axes; THD is BSHD with several segments in each row."""

    SBHD = "sbhd"
    BSHD = "bshd"
    THD = "thd"


class QKVLayout(Enum):
    """Which of q, k and v are one array; those of THD have the shapes of BSHD."""

    BS3HD = "bs3hd"
    BSHD_BS2HD = "bshd_bs2hd"
    BSHD_BSHD_BSHD = "bshd_bshd_bshd"
    T3HD = "t3hd"
    THD_T2HD = "thd_t2hd"
    THD_THD_THD = "thd_thd_thd"

    def get_qkv_format(self) -> QKVFormat:
        """The order of its axes."""
        return QKVFormat.THD if self.is_thd() else QKVFormat.BSHD

    def is_qkvpacked(self) -> bool:
        """Whether q, k and v are one array."""
        return "3hd" in self.value

    def is_kvpacked(self) -> bool:
        """Whether k and v are."""
        return "2hd" in self.value

    def is_separate(self) -> bool:
        """Whether all three are arrays of their own."""
        return not (self.is_qkvpacked() or self.is_kvpacked())

    def is_thd(self) -> bool:
        """Whether a row may hold several segments."""
        return self.value.startswith("t")

    def to_qkvpacked(self) -> QKVLayout:
        """The layout of one array in this format."""
        return QKVLayout.T3HD if self.is_thd() else QKVLayout.BS3HD

    def to_kvpacked(self) -> QKVLayout:
        """The layout of q, and k with v, in this format."""
        return QKVLayout.THD_T2HD if self.is_thd() else QKVLayout.BSHD_BS2HD

    def to_separate(self) -> QKVLayout:
        """The layout of three arrays in this format."""
        return QKVLayout.THD_THD_THD if self.is_thd() else QKVLayout.BSHD_BSHD_BSHD


class CPStrategy(Enum):
    """How a sequence that is spread over devices is computed."""

    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


class ReorderStrategy(Enum):
    """How tokens are spread over devices so that each has as much to do under a causal mask.

    DualChunkSwap gives each device a chunk from the front and its mirror image from the end;
    Striped deals stripes of tokens out in turn.
    """

    DualChunkSwap = 0
    Striped = 1


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    """The mask of a name, whose words may be in any order that TransformerEngine knows, as
    `causal_padding`. Raises: SpecError, a ValueError, where there is none."""
    words = attn_mask_type.replace("no_mask", "none").replace("bottom_right", "bottom-right")
    for each in AttnMaskType:
        own = each.value.replace("bottom_right", "bottom-right")
        if sorted(own.split("_")) == sorted(words.split("_")):
            return each
    known = ", ".join(each.value for each in AttnMaskType).replace("none", "no_mask")
    raise SpecError(f"attn_mask_type={attn_mask_type!r} is not a mask. Use one of {known}.")
