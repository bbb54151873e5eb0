"""TransformerEngine's names and their numbers: layouts, masks, biases, softmaxes, backends, dtypes.

Numbers are those of transformer_engine/fused_attn.h, so that values of TransformerEngine's own
enumerations, which are equal as integers, are taken where one of these is.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch


class _Cast(IntEnum):
    """Numbers that other enumerations have too."""

    @classmethod
    def cast(cls, value: Any) -> Any:
        """The member of this number, of whatever enumeration it is. Raises: ValueError."""
        return value if isinstance(value, cls) else cls(int(value))


class FusedAttnBackend(_Cast):
    """Kinds of fused kernels. F16_max512, which TransformerEngine no longer has, is accepted where
    F16_arbitrary_seqlen is: which tiles a call takes follows from its shapes."""

    No_Backend = -1
    F16_max512 = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2


class DType(_Cast):
    """Dtypes of tensors as TransformerEngine numbers them."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


class NVTE_QKV_Format(IntEnum):
    """Orders of the axes of Q, and of K and V."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2
    NVTE_BSHD_2SBHD = 3
    NVTE_SBHD_2BSHD = 4
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6
    NVTE_BHSD = 7
    NVTE_QKV_Format_NOT_SET = 8


# In the order of their numbers.
QKVLayouts = (
    *("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd"),
    *("bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d", "bshd_bshd_bshd"),
    *("t3hd", "th3d", "thd_t2hd", "thd_th2d", "thd_thd_thd"),
    *("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd"),
    *("paged_kv_bshd_bshd_bshd", "paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd"),
    *("paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_bshd_bshd", "paged_kv_thd_sbhd_sbhd"),
    "bhsd_bhsd_bhsd",
)
_MEMBERS = [f"NVTE_{name.upper().replace('PAGED_KV', 'Paged_KV')}" for name in QKVLayouts]
NVTE_QKV_Layout: Any = IntEnum(  # type: ignore[misc]  # whose members are no literals
    "NVTE_QKV_Layout", [*_MEMBERS, "NVTE_QKV_Layout_NOT_SET"], start=0
)


class NVTE_Bias_Type(IntEnum):
    """Where a bias is added."""

    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2
    NVTE_ALIBI = 3


class NVTE_Mask_Type(IntEnum):
    """Masks, which hide keys of queries."""

    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


class NVTE_Softmax_Type(IntEnum):
    """Additions to the softmax's denominator."""

    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


QKVFormat = {None: NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET} | {
    each.name.removeprefix("NVTE_").lower(): each
    for each in NVTE_QKV_Format
    if each is not NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
}
QKVLayout = {name: NVTE_QKV_Layout(number) for number, name in enumerate(QKVLayouts)}
AttnBiasType = {each.name.removeprefix("NVTE_").lower(): each for each in NVTE_Bias_Type}
AttnMaskType = {
    each.name.removeprefix("NVTE_").lower().removesuffix("_mask"): each for each in NVTE_Mask_Type
} | {"no_mask": NVTE_Mask_Type.NVTE_NO_MASK}
del AttnMaskType["no"]
SoftmaxType = {
    each.name.removeprefix("NVTE_").removesuffix("_SOFTMAX").lower().replace("_", "-"): each
    for each in NVTE_Softmax_Type
}

AttnTypes = ("self", "cross")
AttnMaskTypes = (*AttnMaskType, "arbitrary")
AttnBiasTypes = tuple(AttnBiasType)

TE_DType = {
    torch.uint8: DType.kByte,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
}
TE_DType_To_Torch = {number: dtype for dtype, number in TE_DType.items()}


class FP8FwdTensorIdx(IntEnum):
    """Slots of a forward's scales and maxima."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensorIdx(IntEnum):
    """Slots of a backward's scales and maxima."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


META_QKV = FP8FwdTensorIdx.GEMM1_OUTPUT
META_O = FP8FwdTensorIdx.GEMM2_INPUT
META_S = FP8FwdTensorIdx.GEMM3_OUTPUT
META_DQKV = FP8BwdTensorIdx.GRAD_OUTPUT1
META_DO = FP8BwdTensorIdx.GRAD_INPUT2
META_DP = FP8BwdTensorIdx.GRAD_INPUT3
