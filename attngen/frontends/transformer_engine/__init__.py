"""TransformerEngine's interface of attention: its names and arguments, attngen's kernels.

It builds on attngen's public names alone: `attngen.attention` and `torch.ops.attngen`.
"""

from .backends import (
    FlashAttention,
    FusedAttention,
    UnfusedDotProductAttention,
)
from .choice import _attention_backends
from .dot_product_attention import DotProductAttention
from .emulation import FP8EmulationFunc
from .function import FusedAttnFunc
from .fused_backward import fused_attn_bwd
from .fused_forward import fused_attn_fwd
from .graphs import make_graphed_callables
from .inference import InferenceParams
from .kernels import get_fused_attn_backend
from .kv_cache import KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager
from .layouts import get_qkv_format
from .masks import check_set_window_size
from .names import (
    META_DO,
    META_DP,
    META_DQKV,
    META_O,
    META_QKV,
    META_S,
    AttnBiasType,
    AttnBiasTypes,
    AttnMaskType,
    AttnMaskTypes,
    AttnTypes,
    DType,
    FP8BwdTensorIdx,
    FP8FwdTensorIdx,
    FusedAttnBackend,
    QKVFormat,
    QKVLayout,
    QKVLayouts,
    SoftmaxType,
    TE_DType,
    TE_DType_To_Torch,
)
from .rng import CudaRNGStatesTracker
from .selection import AttentionParams, get_attention_backend

__all__ = [
    "META_DO",
    "META_DP",
    "META_DQKV",
    "META_O",
    "META_QKV",
    "META_S",
    "AttnBiasType",
    "AttnBiasTypes",
    "AttnMaskType",
    "AttnMaskTypes",
    "AttnTypes",
    "AttentionParams",
    "CudaRNGStatesTracker",
    "DType",
    "DotProductAttention",
    "FP8BwdTensorIdx",
    "FP8EmulationFunc",
    "FP8FwdTensorIdx",
    "FlashAttention",
    "FusedAttention",
    "FusedAttnBackend",
    "FusedAttnFunc",
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "QKVFormat",
    "QKVLayout",
    "QKVLayouts",
    "SoftmaxType",
    "TE_DType",
    "TE_DType_To_Torch",
    "UnfusedDotProductAttention",
    "_attention_backends",
    "check_set_window_size",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "get_attention_backend",
    "get_fused_attn_backend",
    "get_qkv_format",
    "make_graphed_callables",
]
