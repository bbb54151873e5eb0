"""The FP8 forward's test matrix: the axes of the 16-bit one, and dtypes and scales."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen import AttentionSpec

from . import cases, oracle, oracle_fp8
from .cases import Case
from .oracle_fp8 import DTYPES

HEAD_DIMS = range(16, 257, 16)
# Of Q, of K and V, of the output.
DTYPE_TRIPLES = (
    *(("e4m3", "e4m3", "bf16"), ("e4m3", "e4m3", "e4m3"), ("e4m3", "e5m2", "fp16")),
    *(("e5m2", "e5m2", "bf16"), ("e5m2", "e4m3", "e5m2")),
)
PAIRS = (
    *((16, 256), (256, 16), (192, 128), (128, 192), (80, 48), (48, 80), (208, 144)),
    *((64, 128), (128, 64), (240, 32), (112, 64), (160, 176)),
)


@dataclass(frozen=True)
class Fp8Case(Case):
    """One call of the FP8 forward. scaled: with a descale a head, and a scale of an FP8 output."""

    dtype: str = "e4m3"
    kv_dtype: str = "e4m3"
    out_dtype: str = "bf16"
    scaled: bool = False

    def __str__(self) -> str:
        scaled = "-scaled" if self.scaled else ""
        return f"{super().__str__()}-kv-{self.kv_dtype}-to-{self.out_dtype}{scaled}"

    @property
    def spec(self) -> AttentionSpec:
        """The kernel that serves the case."""
        plain = cases.spec(self.d, self.d_v, self.dtype, self.mask, self.window)
        return dataclasses.replace(plain, kv_dtype=self.kv_dtype, out_dtype=self.out_dtype)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention`."""
        plain = {**super().arguments, "out_dtype": DTYPES[self.out_dtype]}
        return {**plain, **self.scales} if self.scaled else plain

    @property
    def scales(self) -> dict[str, Tensor]:
        """Descales between 1/4 and 2 for each head; an FP8 output of them fits its format."""
        batch, _, heads_kv = self.heads
        generator = torch.Generator().manual_seed(0)
        found = {
            f"descale_{name}": (0.25 + 1.75 * torch.rand(batch, heads_kv, generator=generator))
            for name in "qkv"
        }
        if self.out_dtype in ("e4m3", "e5m2"):
            found["scale_o"] = torch.tensor([7.0])
        return {name: scale.to(oracle.DEVICE) for name, scale in found.items()}

    def operands(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v."""
        return oracle_fp8.operands(
            *(*self.heads, *self.lengths, self.d, self.d_v),
            layout=self.layout,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            seed=seed,
        )


def spec(
    d: int,
    d_v: int | None = None,
    mask: str = "none",
    window: tuple[int, int] = (-1, -1),
    dtypes: tuple[str, str, str] = DTYPE_TRIPLES[0],
) -> AttentionSpec:
    """The spec of a kernel."""
    q, kv, out = dtypes
    return Fp8Case(d, d_v or d, q, mask, window, kv_dtype=kv, out_dtype=out).spec


def _case(number: int, d: int, d_v: int, kind: str, **fixed: Any) -> Fp8Case:
    """Case number `number` of a list: what is not fixed turns at different paces."""
    mask, window, bottom_right = cases.MASKS[kind][number // 4 % len(cases.MASKS[kind])]
    q, kv, out = DTYPE_TRIPLES[number % len(DTYPE_TRIPLES)]
    turning = {
        "mask": mask,
        "window": window,
        "bottom_right": bottom_right,
        "heads": cases.HEADS[number % len(cases.HEADS)],
        "lengths": cases.LENGTHS[number % len(cases.LENGTHS)],
        "layout": cases.LAYOUTS[number % len(cases.LAYOUTS)],
        "dtype": q,
        "kv_dtype": kv,
        "out_dtype": out,
        "scaled": number % 2 == 1,
    }
    return Fp8Case(d, d_v, **{**turning, **fixed})


@functools.cache
def every_head_dim() -> list[Fp8Case]:
    """d = d_v, each multiple of 16, two kernels each."""
    return [
        _case(37 * turn + n, d, d, cases.KINDS[(n + turn) % 4])
        for n, d in enumerate(HEAD_DIMS)
        for turn in (0, 1)
    ]


@functools.cache
def unequal_head_dims() -> list[Fp8Case]:
    """d != d_v."""
    return [_case(n + 3, *pair, cases.KINDS[n % 4]) for n, pair in enumerate(PAIRS)]


@functools.cache
def every_mask() -> list[Fp8Case]:
    """Every mask and window, for head dims with different tiles, on one kernel a kind of mask."""
    found: list[Fp8Case] = []
    for d in (64, 128, 256):
        for kind, choices in cases.MASKS.items():
            for mask, window, bottom_right in choices:
                for _ in range(2):
                    fixed = {"mask": mask, "window": window, "bottom_right": bottom_right}
                    dtypes = {"dtype": "e4m3", "kv_dtype": "e4m3", "out_dtype": "bf16"}
                    found.append(_case(len(found), d, d, kind, **fixed, **dtypes))
    return found


@functools.cache
def every_dtype() -> list[Fp8Case]:
    """Every combination of dtypes."""
    eight, every = ("e4m3", "e5m2"), ("bf16", "fp16", "e4m3", "e5m2")
    triples = [(q, kv, out) for q in eight for kv in eight for out in every]
    return [
        _case(n, 128, 128, "causal", dtype=q, kv_dtype=kv, out_dtype=out, scaled=scaled)
        for n, (q, kv, out) in enumerate(triples)
        for scaled in (False, True)
    ]
