"""The forward's test matrix: every axis met with every other at least in pairs, few kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen import AttentionSpec

from . import oracle

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("bshd", "sbhd", "bhsd")
HEADS = ((2, 2, 2), (1, 4, 2), (2, 6, 2), (1, 8, 1), (3, 5, 1), (1, 3, 3))  # batch, h_q, h_kv
LENGTHS = ((200, 200), (130, 333), (333, 130), (65, 127), (129, 64), (1, 300), (257, 257))

# mask, window, bottom_right: by the kernel that serves them.
MASKS: dict[str, list[tuple[str, tuple[int, int], bool | None]]] = {
    "none": [("none", (-1, -1), None), ("none", (-1, -1), True)],
    "causal": [
        ("causal", (-1, -1), None),
        ("causal_bottom_right", (-1, -1), None),
        ("causal", (-1, -1), True),
    ],
    "window": [
        ("none", (0, 0), None),
        ("none", (5, 5), None),
        ("none", (50, 20), True),
        ("none", (-1, 30), None),
        ("none", (30, -1), None),
        ("none", (30, -1), True),
        ("none", (0, 200), True),
    ],
    "causal_window": [
        ("causal", (40, 0), None),
        ("causal_bottom_right", (17, -1), None),
        ("causal", (130, 9), None),
        ("causal_bottom_right", (0, 0), None),
    ],
}
KINDS = tuple(MASKS)
PAIRS = (
    *((8, 256), (256, 8), (192, 128), (128, 192), (72, 40), (40, 72), (200, 136)),
    *((64, 128), (128, 64), (248, 24), (16, 232), (256, 192), (104, 56), (64, 72)),
)


@dataclass(frozen=True)
class Case:
    """One call of the forward."""

    d: int
    d_v: int
    dtype: str = "bf16"
    mask: str = "none"
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool | None = None
    heads: tuple[int, int, int] = (2, 2, 2)
    lengths: tuple[int, int] = (200, 200)
    layout: str = "bshd"
    partial: bool = False

    def __str__(self) -> str:
        window = "" if self.window == (-1, -1) else f"-w{self.window[0]},{self.window[1]}"
        aligned = {None: "", True: "-low", False: "-top"}[self.bottom_right]
        heads, lengths = ("x".join(map(str, x)) for x in (self.heads, self.lengths))
        head = f"d{self.d}x{self.d_v}-{self.dtype}-{self.mask}{window}{aligned}"
        return f"{head}-b{heads}-s{lengths}-{self.layout}{'-partial' if self.partial else ''}"

    @property
    def spec(self) -> AttentionSpec:
        """The kernel that serves the case."""
        return spec(self.d, self.d_v, self.dtype, self.mask, self.window, self.partial)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention`."""
        return {
            "mask": self.mask,
            "window": self.window,
            "bottom_right": self.bottom_right,
            "layout": self.layout,
        }

    def operands(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v."""
        return oracle.operands(
            *(*self.heads, *self.lengths, self.d, self.d_v, DTYPES[self.dtype], self.layout), seed
        )


def spec(
    d: int,
    d_v: int | None = None,
    dtype: str = "bf16",
    mask: str = "none",
    window: tuple[int, int] = (-1, -1),
    partial: bool = False,
) -> AttentionSpec:
    """The spec of a kernel; cases that differ in alignment alone share one."""
    return AttentionSpec(
        head_dim=d,
        head_dim_v=d_v or d,
        dtype=dtype,
        mask=mask.removesuffix("_bottom_right"),
        window=max(window) >= 0,
        out_dtype="fp32" if partial else None,
    )


def core_specs(*dims: int, kinds: tuple[str, ...] = KINDS) -> list[AttentionSpec]:
    """bf16 kernels of these head dims for these kinds of mask."""
    firsts = [MASKS[kind][0] for kind in kinds]
    return [spec(d, None, "bf16", mask, window) for d in dims for mask, window, _ in firsts]


def _case(number: int, d: int, d_v: int, dtype: str, kind: str, **fixed: Any) -> Case:
    """Case number `number` of a list: heads, lengths, layout and mask turn at different paces."""
    choices = MASKS[kind]
    mask, window, bottom_right = choices[number // 4 % len(choices)]
    defaults = {
        "mask": mask,
        "window": window,
        "bottom_right": bottom_right,
        "heads": HEADS[number % len(HEADS)],
        "lengths": LENGTHS[number % len(LENGTHS)],
        "layout": LAYOUTS[number % len(LAYOUTS)],
    }
    return Case(d, d_v, dtype, **{**defaults, **fixed})


@functools.cache
def every_head_dim() -> list[Case]:
    """d = d_v, each multiple of 8, two shapes each."""
    return [
        _case(32 * turn + 5 * turn + n, d, d, "bf16", KINDS[n % 4])
        for n, d in enumerate(range(8, 257, 8))
        for turn in (0, 1)
    ]


@functools.cache
def fp16_head_dims() -> list[Case]:
    """A sample of the same in float16."""
    dims = (8, 24, 72, 96, 160, 192, 216)
    return [_case(3 * n + 1, d, d, "fp16", KINDS[(n + 1) % 4]) for n, d in enumerate(dims)]


@functools.cache
def unequal_head_dims() -> list[Case]:
    """d != d_v: each pair in bf16, the first seven in fp16 too, with another mask."""
    cases = [
        _case(n + 11 * t, *pair, "bf16", KINDS[n % 4])
        for n, pair in enumerate(PAIRS)
        for t in (0, 1)
    ]
    fp16 = [_case(n + 5, *pair, "fp16", KINDS[(n + 2) % 4]) for n, pair in enumerate(PAIRS[:7])]
    return cases + fp16


@functools.cache
def every_mask() -> list[Case]:
    """Every mask and window, in both dtypes, for head dims with different tiles."""
    found = []
    for d in (64, 128, 256):
        for kind, choices in MASKS.items():
            for mask, window, bottom_right in choices:
                for dtype in DTYPES:
                    for _ in range(2):
                        fixed = {"mask": mask, "window": window, "bottom_right": bottom_right}
                        found.append(_case(len(found), d, d, dtype, kind, **fixed))
    return found


@functools.cache
def partial_cases() -> list[Case]:
    """Float32 output, for every mask kind."""
    return [
        *(_case(n, 64, 64, "bf16", "none", partial=True) for n in range(3)),
        *(_case(n, 128, 128, "bf16", "causal", partial=True) for n in range(3)),
        *(_case(n, 192, 128, "fp16", "window", partial=True) for n in range(0, 20, 3)),
        *(_case(n, 256, 256, "bf16", "causal_window", partial=True) for n in range(0, 16, 4)),
        *(_case(n, 72, 40, "bf16", "causal", partial=True) for n in range(3)),
        *(_case(n, 8, 8, "fp16", "none", partial=True) for n in range(2)),
    ]
