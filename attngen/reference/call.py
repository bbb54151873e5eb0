"""The arguments of one attention call as a value, and the operands found in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from ..spec.layouts import Layout, size

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn.attention.flex_attention import BlockMask

ScoreMod = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
MaskMod = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
Sides = tuple["int | None", "int | None"]  # keys before and after the diagonal, None or −1 for all
Window = Sequence["int | None"] | None  # as a call gives them, a list or NumPy's; None for all

Side = Literal["q", "kv"]
# The arguments that scale FP8 tensors, in the order in which operations take them.
SCALES = ("descale_q", "descale_k", "descale_v", "scale_s", "descale_s", "scale_o")


@dataclass(frozen=True, eq=False)
class Lengths:
    """What says the lengths of one side of a call, Q or K/V; any of them may be absent."""

    cu_seqlens: Tensor | None
    padded: Tensor | None
    seqused: Tensor | None

    @property
    def absent(self) -> bool:
        return self.cu_seqlens is None and self.padded is None and self.seqused is None


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """Every argument of `attention()` under its own name, as given, nothing resolved."""

    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    layout: str = "bshd"
    mask: str = "none"
    window: Sides = (-1, -1)
    bottom_right: bool | None = None
    attn_mask: Tensor | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    bias: Tensor | None = None
    bias_type: str = "post_scale"
    alibi_slopes: Tensor | bool | None = None
    softmax: str = "vanilla"
    sink: Tensor | None = None
    dropout_p: float = 0.0
    rng_state: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | Tensor | None = None
    max_seqlen_kv: int | Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_kv: Tensor | None = None
    page_table: Tensor | tuple[Tensor, Tensor] | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    block_mask: BlockMask | None = None
    descale_q: Tensor | None = None
    descale_k: Tensor | None = None
    descale_v: Tensor | None = None
    scale_s: Tensor | None = None
    descale_s: Tensor | None = None
    scale_o: Tensor | None = None
    out_dtype: dtype | None = None
    return_lse: bool = False
    return_max_logit: bool = False
    return_amax: bool = False

    @property
    def has_alibi(self) -> bool:
        """Whether ALiBi is asked for, by `alibi_slopes` or by `bias_type="alibi"`."""
        asked = self.alibi_slopes is not None and self.alibi_slopes is not False
        return asked or self.bias_type == "alibi"

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """The arguments that scale FP8 tensors, by their names."""
        return {name: getattr(self, name) for name in SCALES}

    def lengths(self, side: Side, layout: Layout) -> Lengths:
        """The length arguments of one side; of the other where Q, K and V have one length."""
        q = Lengths(self.cu_seqlens_q, self.cu_seqlens_q_padded, self.seqused_q)
        kv = Lengths(self.cu_seqlens_kv, self.cu_seqlens_kv_padded, self.seqused_kv)
        own, other = (q, kv) if side == "q" else (kv, q)
        return other if layout.one_length and own.absent else own

    @property
    def page_tables(self) -> tuple[Tensor, ...]:
        """The tables of K and V, which may be one tensor twice; empty without paging."""
        if self.page_table is None:
            return ()
        if isinstance(self.page_table, (tuple, list)):
            return tuple(self.page_table)
        return (self.page_table, self.page_table)


@dataclass(frozen=True, eq=False)
class Operands:
    """Q, K and V of a call as views in their formats, with the sizes read off them."""

    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    batch: int

    @property
    def h_q(self) -> int:
        return size(self.q.shape, self.layout.q_format, "h")

    @property
    def h_kv(self) -> int:
        return size(self.k.shape, self.layout.kv_format, "h")

    @property
    def dense_s_q(self) -> int | None:
        """Positions that each sequence of Q has room for; None where Q is `thd`."""
        fmt = self.layout.q_format
        return None if fmt == "thd" else size(self.q.shape, fmt, "s")

    @property
    def dense_s_kv(self) -> int | None:
        """Positions that each sequence of K has room for; None for `thd` and paged K."""
        fmt = self.layout.kv_format
        if fmt == "thd" or self.layout.paged:
            return None
        return size(self.k.shape, fmt, "s")


_NAMES = tuple(field.name for field in fields(AttentionCall))


def named(call: AttentionCall) -> dict[str, Any]:
    """The arguments of a call by their names, as torch.compile can follow: not `vars`, which it
    does not know of dataclasses everywhere."""
    return {name: getattr(call, name) for name in _NAMES}
