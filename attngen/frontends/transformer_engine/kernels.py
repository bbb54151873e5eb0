"""`get_fused_attn_backend`: whether kernels serve a call, from what resolving its spec says."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ... import AttentionSpec
from ...call.served import unserved, without_splits
from ...fragments import features
from ...spec.layouts import Layout, axes_of, parse
from ...spec.resolve import find_violations
from ...targets.target import assumed, names, of_capability
from .arguments import taking
from .eight_bits import torch_dtype
from .names import AttnBiasType, AttnMaskType, FusedAttnBackend, QKVLayout, SoftmaxType
from .variants import BIAS_TYPES, variant_of

_FEATURES = features.scan()  # here, not in a call: torch.compile cannot trace file access
_NUMBERS: dict[str, dict[str, Any]] = {
    "layout": QKVLayout,
    "bias": {**AttnBiasType},
    "mask": {**AttnMaskType},
    "softmax": {**SoftmaxType},
}
_NAME_OF = {kind: {int(x): name for name, x in each.items()} for kind, each in _NUMBERS.items()}


@dataclass(frozen=True)
class Question:
    """Arguments of `get_fused_attn_backend`, in TransformerEngine's order: of enumerations a member
    or its number, and of layouts, biases, masks and softmaxes the name as well."""

    is_training: bool
    q_dtype: Any
    kv_dtype: Any
    qkv_layout: Any
    bias_type: Any
    mask_type: Any
    softmax_type: Any
    p_dropout: float
    num_heads: int
    num_gqa_groups: int
    max_seqlen_q: int
    max_seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    window_left: int
    window_right: int
    return_max_logit: bool
    cuda_graph: bool
    deterministic: bool

    @property
    def layout(self) -> str:
        """The layout's name. Raises: KeyError where there is none."""
        return _name_of("layout", self.qkv_layout)


class _Operand(NamedTuple):
    """A tensor as a spec sees it."""

    dtype: Any
    shape: tuple[int, ...]


@taking(Question)
def get_fused_attn_backend(question: Question) -> FusedAttnBackend:
    """F16_arbitrary_seqlen, or FP8 of FP8 dtypes, where kernels of the current device serve such
    calls, in training in both directions, else No_Backend. Without a device, for the GPU that
    attngen has kernels for. FP8 trains with a backward in 8 bits.

    NVTE_DEBUG=1 with NVTE_DEBUG_LEVEL=2 logs why kernels refuse. Raises: KeyError for a name or
    number that there is not.
    """
    reasons = refusals(question)
    for reason in reasons:
        logging.getLogger("DotProductAttention").debug("no fused kernels: %s", reason)
    if reasons:
        return FusedAttnBackend.No_Backend
    in_8_bits = torch_dtype(question.q_dtype).itemsize == 1
    return FusedAttnBackend.FP8 if in_8_bits else FusedAttnBackend.F16_arbitrary_seqlen


def refusals(question: Question) -> list[str]:
    """Why no kernel serves such calls; empty where one does. Raises: KeyError."""
    arch = device_arch()
    if arch is None:
        return [f"the current device has no kernels; available: {', '.join(names())}"]
    dtypes = [torch_dtype(x) for x in (question.q_dtype, question.kv_dtype)]
    forward = replace(_spec_of(question, *dtypes), arch=(arch,))
    asked = [without_splits(forward, arch)]
    if question.is_training:
        backward = replace(
            forward,
            decode=False,
            return_max_logit=False,
            directions=("bwd",),
            deterministic=question.deterministic,
        )
        asked.append(backward)
    found = [each.reason for spec in asked for each in find_violations(spec, _FEATURES)]
    return [*dict.fromkeys(found)] or [x for spec in asked for x in unserved(spec, arch)]


def device_arch() -> str | None:
    """The architecture whose kernels run on the current device, the assumed one without a device;
    None where there are none. Raises: SpecError where ATTNGEN_TARGET names none."""
    if not torch.cuda.is_available():
        return assumed()
    target = of_capability(torch.cuda.get_device_capability())
    return None if target is None else target.name


def _spec_of(question: Question, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionSpec:
    """The forward's spec, of a sequence of the longest lengths."""
    layout = parse(question.layout)
    mask = _name_of("mask", question.mask_type)
    softmax, bias = _name_of("softmax", question.softmax_type), _name_of("bias", question.bias_type)
    window = (question.window_left, question.window_right)
    variant = variant_of(layout.name, mask, window, None, softmax, bias)
    tensors = [_operand(question, layout, name, q_dtype, kv_dtype) for name in ("q", "k", "v")]
    arguments = {
        "layout": layout.name,
        "mask": variant.mask,
        "window": variant.window,
        "softmax": variant.softmax,
        "bias": True if bias in BIAS_TYPES else None,
        "bias_type": variant.bias_type,
        "alibi_slopes": bias == "alibi" or None,
        "attn_mask": True if mask == "arbitrary" else None,
        "dropout_p": question.p_dropout * question.is_training,
        "return_max_logit": question.return_max_logit,
    }
    return AttentionSpec.of_arguments(tensors, arguments)


def _operand(
    question: Question, layout: Layout, name: str, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> _Operand | None:
    """The tensor that a call has as q, k or v; None where it is packed into another."""
    carrier, _, _ = layout.home(name)
    if carrier != name:
        return None
    of_q = name == "q"
    sizes = {"b": 1, "pages": 1, "2": 2, "3": 3}
    sizes |= dict.fromkeys("st", question.max_seqlen_q if of_q else question.max_seqlen_kv)
    sizes["page_size"] = sizes["s"]
    sizes["h"] = question.num_heads if of_q else question.num_gqa_groups
    sizes["d"] = question.head_dim_v if name == "v" else question.head_dim_qk
    return _Operand(
        q_dtype if of_q else kv_dtype, tuple(sizes[axis] for axis in axes_of(layout, name))
    )


def _name_of(kind: str, value: Any) -> str:
    """The name of a layout, mask, bias or softmax that is a name or a number."""
    known = _NAME_OF[kind]
    if isinstance(value, str):
        if value not in known.values() and (kind, value) != ("mask", "arbitrary"):
            raise KeyError(value)
        return value
    return known[int(value)]
