"""Float8Tensor: numbers in 8 bits with their scale, which autograd takes for 16-bit ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import SpecError
from ...reference.fp8 import DTYPES

_aten = torch.ops.aten
# Operations that move numbers and change none.
_MOVES = {
    each.default
    for each in (
        *(_aten.alias, _aten.clone, _aten.detach, _aten.expand, _aten.permute, _aten.unsqueeze),
        *(_aten.view, _aten._unsafe_view, _aten.t, _aten.squeeze, _aten.as_strided),
    )
} | {
    *(_aten.transpose.int, _aten.slice.Tensor, _aten.select.int, _aten.squeeze.dim),
    *(_aten.squeeze.dims,),
}
_PARTS = {_aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default}


class Float8Tensor(Tensor):
    """Numbers x8 in float8_e4m3fn or float8_e5m2 that stand for x8 · scale_inv.

    Its dtype is nominal: that of the gradients and of what arithmetic gives, for which its numbers
    are widened first. `attngen.attention` reads the stored ones. Views and copies share the scale.

    stored: FP8, of any shape. scale_inv: float32 [1] on its device. dtype: float16, bfloat16 or
    float32.

    Raises: SpecError with every violation at once.
    """

    _data: Tensor
    _scale_inv: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> Any:
        if reasons := _violations(stored, scale_inv, dtype):
            raise SpecError(reasons)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            stored.shape,
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=dtype,
            device=stored.device,
        )
        made._data, made._scale_inv = stored, scale_inv
        return made

    def __init__(self, stored: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16):
        pass

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers that the stored ones stand for, in the nominal dtype or another one."""
        wide: Tensor = _Widen.apply(self)  # type: ignore[no-untyped-call]
        return wide.to(self.dtype if dtype is None else dtype)

    def widened(self) -> Tensor:
        """The numbers that the stored ones stand for, in float32 and apart from autograd."""
        return self._data.float() * self._scale_inv

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stored = str(self._data.dtype).removeprefix("torch.")
        return f"Float8Tensor({stored} {list(self.shape)}, nominally {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_data", "_scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
    ) -> Float8Tensor:
        return Float8Tensor(inner["_data"], inner["_scale_inv"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first, *rest = args or (None,)
        if isinstance(first, Float8Tensor) and func in _MOVES | _PARTS:
            moved = func(first._data, *rest, **kwargs)
            if isinstance(moved, Tensor):
                return Float8Tensor(moved, first._scale_inv, first.dtype)
            return [Float8Tensor(x, first._scale_inv, first.dtype) for x in moved]
        wide = pytree.tree_map_only(Float8Tensor, _nominal, (args, kwargs))
        args, kwargs = wide
        return func(*args, **kwargs)


def _nominal(x: Float8Tensor) -> Tensor:
    return x.widened().to(x.dtype)


class _Widen(torch.autograd.Function):
    """The numbers that stored ones stand for, whose gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, x: Float8Tensor) -> Tensor:
        return x.widened()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _violations(stored: Any, scale_inv: Any, dtype: Any) -> list[str]:
    reasons = []
    if not isinstance(stored, Tensor) or stored.dtype not in DTYPES:
        got = stored.dtype if isinstance(stored, Tensor) else type(stored).__name__
        reasons.append(f"stored needs an FP8 tensor; got {got}. Quantise it.")
    if not isinstance(scale_inv, Tensor) or (scale_inv.dtype, scale_inv.numel()) != (
        torch.float32,
        1,
    ):
        reasons.append(f"scale_inv needs float32 [1]; got {_shape_of(scale_inv)}")
    elif isinstance(stored, Tensor) and scale_inv.device != stored.device:
        reasons.append(f"scale_inv needs device {stored.device}; got {scale_inv.device}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype needs float16, bfloat16 or float32; got {dtype}")
    return reasons


def _shape_of(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
