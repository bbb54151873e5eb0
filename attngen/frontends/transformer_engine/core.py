"""Plans of core attention: from TransformerEngine's words to a call of `attngen.attention`.

What a call's words mean is worked out once, for all calls that differ in their tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, is_grad_enabled, no_grad
from torch.autograd import Function

from ... import attention
from ...errors import SpecError
from ...spec.attention_spec import MAX_TRAINED_HEAD_DIM
from ...spec.layouts import parse
from .masks import seqused_of
from .variants import BIAS_TYPES, Read, as_sink, length_reads, said, variant_of

Output = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Words:
    """A call but for its tensors, in TransformerEngine's words, its mask and window as they are to
    be."""

    layout: str
    mask: str
    window: tuple[int, int]
    bottom_right: bool
    softmax: str
    bias: str
    softmax_scale: float | None
    dropout: float

    @property
    def drops(self) -> bool:
        """Whether there is dropout, as a value that is none of torch.compile's symbols."""
        if self.dropout > 0:  # noqa: SIM103  # a branch, of which traces note which way it went
            return True
        return False


@dataclass(frozen=True)
class How:
    """How a call is computed: on which of attngen's backends, in what context dropout draws, and
    whether gradients have the same bits on every run (None asks PyTorch); whether the largest
    logits are wanted; and whether there is no backward of it, over a cache or in a module that is
    not training."""

    backend: str = "auto"
    context: Callable[[], Any] = nullcontext
    deterministic: bool | None = None
    max_logit: bool = False
    num_splits: int | None = None
    forward_alone: bool = False


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """A call but for its tensors.

    constant: arguments of `attngen.attention`; reads: those that are tensors of the call, by its
    names. drops: whether it has dropout, which draws in `context`.
    """

    constant: dict[str, Any]
    reads: tuple[Read, ...]
    drops: bool
    max_logit: bool
    context: Callable[[], Any]
    forward_alone: bool = False

    def __call__(
        self,
        carriers: tuple[Tensor | None, ...],
        call: Any,
        more: Mapping[str, Any],
        attend: Callable[..., Any] | None = None,
    ) -> Output:
        """The output […, h · d_v], or that and the largest logits [h]; with gradients.

        carriers: q, k and v as the layout has them; call: has what is read as attributes, or `more`
        has it; attend: a layer that keeps scales, None for `attngen.attention`.

        Raises: as `attngen.attention` does.
        """
        attend = attention if attend is None else attend
        given = self.constant.copy()
        for argument, source, make in self.reads:
            value = more[source] if source in more else getattr(call, source)
            given[argument] = value if make is None else make(value)
        q, k, v = carriers
        assert q is not None  # of every layout
        if self.forward_alone and is_grad_enabled():
            with no_grad():
                found = self(carriers, call, more, attend)
            learning = [x for x in carriers if x is not None]
            if isinstance(found, Tensor):
                return _without_gradient(found, learning)
            out, max_logit = found
            return _without_gradient(out, learning), max_logit
        if not self.drops and not self.max_logit:
            plain: Tensor = attend(q, k, v, **given)
            return plain.flatten(-2)
        with self.context() if self.drops else nullcontext():
            out, aux = attend(q, k, v, **given)
        flat: Tensor = out.flatten(-2)
        return (flat, aux.max_logit.to(out.dtype)) if self.max_logit else flat


class _ForwardAlone(Function):
    """An output that wants gradients, as what it is made of does, and has none."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *learning: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise SpecError(
            "this output has no gradient: it was computed over a KV cache, or in a module that was "
            f"not training, of head dims above {MAX_TRAINED_HEAD_DIM}, by kernels without a "
            "backward"
        )


def _without_gradient(out: Tensor, learning: list[Tensor]) -> Tensor:
    marked: Tensor = _ForwardAlone.apply(out, *learning)  # type: ignore[no-untyped-call]
    return marked


def plan_of(words: Words, how: How, batch: int | None, present: Collection[str]) -> PlannedCall:
    """The plan of calls of these words. batch: sequences of dense formats or pages; present: names
    of the tensors that there are beside q, k and v.

    Raises: KeyError for words, SpecError for lengths that there are not.
    """
    constant = _constants(words, how)
    reads = _lengths(words, batch, present)
    if words.mask == "arbitrary":
        assert "attention_mask" in present, "an arbitrary mask needs attention_mask, a tensor"
        reads.append(Read("attn_mask", "attention_mask", Tensor.logical_not))
    if words.bias in BIAS_TYPES:
        if "core_attention_bias" not in present:
            raise SpecError(f"core_attention_bias is None, and {words.bias!r} asks for one")
        reads.append(Read("bias", "core_attention_bias"))
    elif words.bias == "alibi" and "alibi_slopes" in present:
        reads.append(Read("alibi_slopes", "alibi_slopes"))
    if words.softmax != "vanilla":
        assert "softmax_offset" in present, "softmax_type needs softmax_offset"
        reads.append(Read("sink", "softmax_offset", as_sink))
    if parse(words.layout).paged:
        reads.append(Read("page_table", "page_table", lambda table: table[:batch]))
    kept = (words.drops, how.max_logit, how.context, how.forward_alone)
    return PlannedCall(constant, tuple(reads), *kept)


def _constants(words: Words, how: How) -> dict[str, Any]:
    """Arguments that are no tensors, but for those that say what is so anyway."""
    variant = variant_of(
        words.layout, words.mask, words.window, words.bottom_right, words.softmax, words.bias
    )
    slanted = "causal" in words.mask or variant.window != (-1, -1) or words.bias == "alibi"
    given = variant.for_attention() | {
        "bottom_right": bool(words.bottom_right and slanted),
        "softmax_scale": words.softmax_scale,
        "dropout_p": words.dropout,
        "alibi_slopes": words.bias == "alibi" or None,
        "backend": how.backend,
        "deterministic": how.deterministic,
        "num_splits": how.num_splits if _may_split(words) else None,
        "return_rng_state": words.drops,
        "return_max_logit": how.max_logit,
    }
    return said(given)


def _may_split(words: Words) -> bool:
    """Whether kernels that split keys serve such calls; elsewhere splits, which change no result,
    are not asked for."""
    layout = parse(words.layout)
    packed = "thd" in layout.formats and not layout.paged
    beside = words.bias in BIAS_TYPES or words.mask == "arbitrary" or words.drops
    return not (packed or beside)


def _lengths(words: Words, batch: int | None, present: Collection[str]) -> list[Read]:
    """Lengths of cumulative ones, which come first, or of padding masks."""
    layout, padding = parse(words.layout), "padding" in words.mask
    dense = "thd" not in layout.formats and not layout.paged
    if padding and dense and not {"cu_seqlens_q", "cu_seqlens_kv"} <= {*present}:
        if "attention_mask" not in present:
            seqused_of(None)
        side = "q" if layout.one_length else "kv"
        return [
            Read("seqused_q", "attention_mask", lambda masks: seqused_of(masks, "q")),
            Read("seqused_kv", "attention_mask", lambda masks: seqused_of(masks, side)),
        ]
    return length_reads(words.layout, padding, batch, present)
