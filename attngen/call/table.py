"""The table of attention's arguments: one row each, from which all that lists them is made.

A row is a field of `AttentionCall` with an `Argument` as its metadata. Signatures and docstrings of
`attention` and the reference, the operations' schemas and gradients, the keys of calls, checks of
types, conversions of dtypes and parts of DTensors read it here, or are compared with it by
tests/unit/call/test_table.py. Neither torch nor jax is imported: dtypes are words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..spec.layouts import Layout
from .argument import BROADCAST, Argument, Kind, carrier, lengths, other, scale, tables, tensor
from .backend import AUTO, asked, default
from .fragments import LEARNED_SLOT, SLOTS, split_arguments

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn.attention.flex_attention import BlockMask

ScoreMod = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
MaskMod = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
Sides = tuple["int | None", "int | None"]  # keys before and after the diagonal, None or −1 for all
Window = Sequence["int | None"] | None  # as a call gives them, a list or NumPy's; None for all
Side = Literal["q", "kv"]
_ENDS = "Cumulative lengths of packed tokens, on the device, never waited for."
_STARTS = "Where each packed sequence begins, if there are gaps."
_USED = "Positions in use of each sequence of a dense format, or of pages."
_BEGIN = (
    "First row of each sequence of a dense format, int32 [b], 0 by default; lengths then end it, "
    "counted from the tensor's first row."
)
_STANDS = "What a stored number of FP8 {} stands for."
_SCALES_OF_Q, _SCALES_OF_KV = ((("b", "h_kv"), ("b", f"h_{x}", f"s_{x}")) for x in ("q", "kv"))
_LONGEST = "Longest length, which changes no result; a tensor of one is never read."


@dataclass(frozen=True, eq=False)
class Lengths:
    """Arguments that say the lengths of one side of a call, Q or K/V; any of them may be absent."""

    cu_seqlens: Tensor | None
    padded: Tensor | None
    seqused: Tensor | None

    @property
    def absent(self) -> bool:
        return self.cu_seqlens is None and self.padded is None and self.seqused is None


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """Every argument of `attention()` under its own name, as given, nothing resolved."""

    q: Tensor = carrier("[b, s_q, h_q, d] in the default layout; h_q a multiple of h_kv.")
    k: Tensor | None = carrier("[b, s_kv, h_kv, d].", default=None)
    v: Tensor | None = carrier("[b, s_kv, h_kv, d_v].", default=None)
    layout: str = other(
        "word",
        "Order of the axes of q, k and v: a format for all three, such as bshd or thd, or a name "
        "such as bshd_bs2hd of packed tensors or paged_kv_bshd_bshd_bshd of pages.",
        "bshd",
        numbers=("layout",),
    )
    mask: str = other(
        "word",
        "none, causal, padding, padding_causal (the causal ones also with _bottom_right behind "
        "them), arbitrary, or a fragment's name, such as chunked and prefix; of a list all hide.",
        "none",
        given="str | Sequence[str] | None",
        numbers=("mask", "bottom_right"),
    )
    window: Sides = other(
        "window",
        "Keys visible before and after the diagonal; −1 or None is unbounded.",
        (-1, -1),
        given="Window",
        numbers=("window_left", "window_right"),
    )
    bottom_right: bool | None = other(
        "choice",
        "Whether the last query sees as far as the last key; None asks the mask.",
        numbers=("bottom_right",),
    )
    positions: Sequence[int | Tensor] | None = other(
        "positions",
        "Of parts of sequences: (query, key), where the first ones stand in the whole, as masks, "
        "ALiBi and dropout follow; then, if it is not query − key, the key on the first query's "
        "diagonal, counted from the first key; then dropout's first head and first sequence. All "
        "but the head may be int32 [b].",
        numbers=("positions",),
        feature="positions",
    )
    attn_mask: Tensor | None = tensor(
        "attn_mask",
        17,
        "True takes part.",
        shapes=(BROADCAST,),
        dtype="bool",
        feature="attn_mask",
    )
    softmax_scale: float | None = other(
        "number", "Factor of the scores; None is 1/√d.", numbers=("softmax_scale",)
    )
    softcap: float = other(
        "number",
        "Bound c of scores, c · tanh(S / c); 0 is none.",
        0.0,
        given="float | None",
        numbers=("softcap",),
    )
    bias: Tensor | None = tensor(
        "bias",
        18,
        "Added to scores; other floats are cast, saturating, with their gradient.",
        shapes=(BROADCAST,),
        dtype="q",
        gradient="dbias",
        differentiable=True,
    )
    bias_type: str = other(
        "word",
        "Where a bias is added: post_scale or pre_scale; alibi asks for ALiBi's own slopes.",
        "post_scale",
        numbers=("bias_type",),
    )
    alibi_slopes: Tensor | bool | None = tensor(
        "alibi_slopes",
        14,
        "ALiBi's slopes; True takes those of its paper.",
        kind="slopes",
        shapes=(("h_q",), ("b", "h_q")),
        dtype="float32",
        differentiable=True,
        feature="alibi",
        advice="Pass one slope a head, or True for the default ones.",
    )
    softmax: str = other(
        "word", "vanilla, off_by_one, or learnable, with sink.", "vanilla", numbers=("softmax",)
    )
    sink: Tensor | None = tensor(
        "sink",
        15,
        "A score of each head that no key has and no mask hides.",
        shapes=(("h_q",),),
        dtype="float32",
        gradient="dsink",
        differentiable=True,
        advice="Pass one score a head.",
    )
    dropout_p: float = other(
        "number",
        "Probability in 0..1 that a weight is dropped.",
        0.0,
        numbers=("dropout_p",),
    )
    rng_state: Tensor | None = tensor(
        "rng_state",
        16,
        "Seed and offset of dropout; drawn where none is given.",
        shapes=(("2",),),
        dtype="int64",
    )
    cu_seqlens_q: Tensor | None = lengths("cu_seqlens_q", 6, _ENDS, "b + 1")
    cu_seqlens_kv: Tensor | None = lengths("cu_seqlens_kv", 7, _ENDS, "b + 1")
    cu_seqlens_q_padded: Tensor | None = lengths("cu_seqlens_q_padded", 8, _STARTS, "b + 1")
    cu_seqlens_kv_padded: Tensor | None = lengths("cu_seqlens_kv_padded", 9, _STARTS, "b + 1")
    max_seqlen_q: int | Tensor | None = other("longest", _LONGEST)
    max_seqlen_kv: int | Tensor | None = other("longest", _LONGEST)
    seqused_q: Tensor | None = lengths("seqused_q", 10, _USED, "b")
    seqused_kv: Tensor | None = lengths("seqused_kv", 11, _USED, "b")
    seqstart_q: Tensor | None = other("starts", _BEGIN, front_end=True)
    seqstart_kv: Tensor | None = other("starts", _BEGIN, front_end=True)
    page_table: Tensor | tuple[Tensor, Tensor] | None = tables(
        ("page_table_k", "page_table_v"),
        12,
        "The pages of each sequence, one table for both or a pair for K and V.",
        ("b", "max_pages"),
    )
    num_splits: int | None = other(
        "choice",
        "Parts in which each sequence's keys are read, 1 to 128; None for as many as fill the "
        "chip, -1 for as many of packed keys, too, of which None splits none.",
        numbers=("num_splits",),
        front_end=True,
    )
    schedule: Any = other(
        "state",
        "An attngen.Schedule, shared by calls of equal lengths, which are then ordered once.",
        given="Schedule | None",
        operands=("schedule",),
        place=19,
        front_end=True,
    )
    score_mod: ScoreMod | str | None = other(
        "function",
        "score_mod(score, b, h, i, j), the score that replaces it, compiled into the kernels; or "
        "the names of score fragments, in their order.",
        given="ScoreMod | str | Sequence[str] | None",
        numbers=("score_mod",),
    )
    mask_mod: MaskMod | None = other(
        "function", "mask_mod(b, h, i, j), whether query i sees key j, made into bits."
    )
    block_mask: BlockMask | None = other(
        "function", "A BlockMask of FlexAttention; a byte a pair.", given="Any"
    )
    descale_q: Tensor | None = scale("descale_q", 0, _STANDS.format("q"), *_SCALES_OF_Q)
    descale_k: Tensor | None = scale("descale_k", 1, _STANDS.format("k"), *_SCALES_OF_KV)
    descale_v: Tensor | None = scale("descale_v", 2, _STANDS.format("v"), *_SCALES_OF_KV)
    scale_s: Tensor | None = scale(
        "scale_s", 3, "By which the softmax's weights are multiplied to be stored in FP8."
    )
    descale_s: Tensor | None = scale("descale_s", 4, "The reciprocal of scale_s.")
    scale_o: Tensor | None = scale(
        "scale_o", 5, "By which an FP8 output is multiplied to be stored."
    )
    out_dtype: dtype | None = other(
        "dtype",
        "The output's: Q's by default, of FP8 bfloat16; beside 16 bits float32, for parts that "
        "merge_states joins.",
        given="torch.dtype | None",
        numbers=("out_dtype",),
    )
    out: Tensor | None = other(
        "result",
        "Where the output is written, of its shape and dtype, and returned: a tensor of any "
        "strides that overlaps no operand. Neither may have a gradient.",
        front_end=True,
    )
    out_layout: str = other(
        "word",
        "How the output lies in memory: contiguous, or like_q, its axes in the order of Q's, and "
        "those of gradients in the order of their operands'.",
        "contiguous",
        numbers=("memory",),
        front_end=True,
    )
    deterministic: bool | None = other(
        "choice",
        "Whether gradients have the same bits on every run, on GPUs with as many multiprocessors; "
        "None asks torch.are_deterministic_algorithms_enabled().",
        numbers=("deterministic",),
        front_end=True,
    )
    return_lse: bool = other("flag", "Asks for aux.lse.", False, decides=True)
    return_max_logit: bool = other(
        "flag", "Asks for aux.max_logit.", False, numbers=("max_logit",), decides=True
    )
    return_amax: bool = other(
        "flag", "Asks for aux.amax_s and aux.amax_o (FP8).", False, numbers=("amax",), decides=True
    )
    return_rng_state: bool = other("flag", "Asks for aux.rng_state.", False, decides=True)
    backend: str = other(
        "word",
        "cuda runs a compiled kernel or refuses; reference is the definition in plain PyTorch, on "
        "any device; auto is what set_backend has chosen, else takes the reference where kernels "
        "refuse a call, and logs the reason once.",
        "auto",
        front_end=True,
    )
    places: Tensor | None = other(
        "tensor",
        "int32 [b, 4], instead of positions: those of each sequence, but for the head.",
    )
    fragment_arguments: tuple[tuple[str, Any], ...] = other(
        "fragments",
        "What the fragments take that the call names, each under its own name; `attngen list` has "
        "them.",
        (),
        given="Any",
        shapes=(("b",), ("h_q",), ("b", "h_q")),
        dtype="float32",
        operands=(*SLOTS, LEARNED_SLOT),
        place=20,
        differentiable=True,
        numbers=("numbers",),
    )

    @property
    def has_alibi(self) -> bool:
        """Whether ALiBi is asked for, by `alibi_slopes` or by `bias_type="alibi"`."""
        asked = self.alibi_slopes is not None and self.alibi_slopes is not False
        return asked or self.bias_type == "alibi"

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the arguments that are functions of positions."""
        given = ((name, getattr(self, name)) for name in FUNCTIONS)
        return tuple([name for name, x in given if x is not None and not isinstance(x, str)])

    @property
    def wants_aux(self) -> bool:
        """Whether the call asks for by-products beside the output."""
        return any([getattr(self, name) for name in DECIDING])

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


def _rows() -> Iterator[Argument]:
    for each in fields(AttentionCall):
        row: Argument = each.metadata["row"]
        yield replace(row, name=each.name, given=row.given or str(each.type))


Rows = dict[str, Argument]
ROWS: Rows = {row.name: row for row in _rows()}
"""Every argument by its name, in the order of signatures."""
REFERENCE_ROWS: Rows = {name: row for name, row in ROWS.items() if not row.front_end}


def names(*kinds: Kind) -> tuple[str, ...]:
    """Arguments of these kinds."""
    return tuple(row.name for row in ROWS.values() if row.kind in kinds)


CARRIERS = ("q", "k", "v")
SCALES = names("scale")
FUNCTIONS = names("function")
DECIDING = tuple(row.name for row in ROWS.values() if row.decides)
_PLACED = sorted((row for row in ROWS.values() if row.operands), key=lambda row: row.place)
OPTIONAL = tuple(operand for row in _PLACED for operand in row.operands)
"""Tensors that a call may have beside q, k and v, in the order in which operations take them."""
INPUTS = (*CARRIERS, *OPTIONAL)
ROW_OF_OPERAND = {name: ROWS[name] for name in CARRIERS} | {
    operand: row for row in _PLACED for operand in row.operands
}
GRADIENT_OF = {"q": "dq", "k": "dk", "v": "dv"} | {
    **{row.name: row.gradient for row in _PLACED if row.gradient},
    LEARNED_SLOT: "dlearned",
}
"""Operands whose gradients `attngen::backward` returns, and what it calls them, in order."""
LEARNED = tuple(name for name in GRADIENT_OF if name in ROWS and name not in CARRIERS)
"""Arguments beside q, k and v that have such a gradient."""


class WantedGradients(NamedTuple):
    """Which gradients a call of the backward is for; those of k and v come together, those of
    `LEARNED` follow in its order, then that of what a score learns."""

    dq: bool = True
    dkv: bool = True
    dsink: bool = True
    dbias: bool = True
    dlearned: bool = True


DIFFERENTIABLE = tuple(name for name in INPUTS if ROW_OF_OPERAND[name].differentiable)
"""Operands whose gradients the reference has, in the order of operations."""
LENGTHS = names("lengths")
STARTS = names("starts")
PAGE_TABLES = ROWS["page_table"].operands


def named(call: AttentionCall) -> dict[str, Any]:
    """The arguments of a call by their names, as torch.compile can follow: not `vars`, which it
    does not know of dataclasses everywhere."""
    return {name: getattr(call, name) for name in _NAMES}


_NAMES = tuple(ROWS)


def given_by(call: AttentionCall) -> dict[str, Any]:
    """The arguments of a call that are not their defaults, as a call gives them."""
    given = {name: x for name, x in named(call).items() if x is not ROWS[name].default}
    return {**given, **dict(given.pop("fragment_arguments", ()))}


def make_call(
    function: str, rows: Rows, operands: dict[str, Any], arguments: dict[str, Any]
) -> AttentionCall:
    """The call of a function of these rows, by name. Raises: TypeError, as Python does, where the
    function has no argument of a name."""
    own, added = split_arguments(function, rows, arguments)
    if "backend" in rows and default.backend != AUTO:
        own["backend"] = asked(own.get("backend") or AUTO)
    return AttentionCall(**operands, **{**own, "fragment_arguments": added} if added else own)
