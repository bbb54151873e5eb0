"""Calls of any layout and lengths, and both directions of one held to the float64 rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec, layouts, reference

from . import oracle
from .cases import DTYPES

GAP = 5  # tokens between sequences, where there are gaps


@dataclass(frozen=True)
class Call:
    """One call. `q_lens`, `kv_lens`: a length a sequence; of a dense side with `room`, positions in
    use of so many. `gaps`: packed sequences lie apart, and tokens before and after them belong to
    none."""

    layout: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...] = ()
    room: tuple[int, int] | None = None
    gaps: bool = False
    d: int = 64
    d_v: int | None = None
    heads: tuple[int, int] = (2, 2)
    mask: str = "none"
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool | None = None
    dtype: str = "bf16"
    cumulative: bool = False  # whether dense sides tell their lengths by cu_seqlens

    def __str__(self) -> str:
        lengths = f"{len(self.q_lens)}x{max(self.q_lens)}"
        window = "" if self.window == (-1, -1) else f"-w{self.window[0]},{self.window[1]}"
        head = f"{self.layout}-{lengths}-d{self.d}x{self.d_v or self.d}-{self.mask}{window}"
        return head + ("-gaps" if self.gaps else "") + ("-room" if self.room else "")

    @property
    def parsed(self) -> layouts.Layout:
        return layouts.parse(self.layout)

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of Q, and of K and V."""
        return self.q_lens, self.kv_lens or self.q_lens

    @property
    def spec(self) -> AttentionSpec:
        """The kernels that serve the call, both directions."""
        return AttentionSpec(
            head_dim=self.d,
            head_dim_v=self.d_v,
            dtype=self.dtype,
            layout=self.layout,
            mask=self.mask.removesuffix("_bottom_right"),
            window=max(self.window) >= 0,
            seqused=self.room is not None,
            directions=("fwd", "bwd"),
        )

    def offsets(self, lens: Sequence[int]) -> list[int]:
        """First token of each packed sequence, and the end of the last."""
        gap = GAP if self.gaps else 0
        return [gap + start + gap * b for b, start in enumerate((0, *itertools.accumulate(lens)))]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention`."""
        found: dict[str, Any] = {
            "layout": self.layout, "mask": self.mask, "window": self.window,
            "bottom_right": self.bottom_right,
        }  # fmt: skip
        sides = zip(("q", "kv"), self.parsed.formats, self.lengths, strict=True)
        for side, axes, lens in sides:
            if side == "kv" and self.parsed.one_length:
                continue
            cumulative = (0, *itertools.accumulate(lens))
            if axes == "thd" or (self.room and self.cumulative):
                found[f"cu_seqlens_{side}"] = int32(cumulative)
            elif self.room:
                found[f"seqused_{side}"] = int32(lens)
            if axes == "thd" and self.gaps:
                found[f"cu_seqlens_{side}_padded"] = int32(self.offsets(lens))
        return found

    def operands(self, seed: int = 0) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Random q, k, v as the layout has them; NaN in what belongs to no sequence."""
        (h_q, h_kv), d_v = self.heads, self.d_v or self.d
        dims = {"q": (h_q, self.d), "k": (h_kv, self.d), "v": (h_kv, d_v)}
        made = {
            name: self.tensor(name, heads, dim, 3 * seed + number)
            for number, (name, (heads, dim)) in enumerate(dims.items())
        }
        names = self.parsed.packed_operands
        if names:
            carrier, axis, _ = self.parsed.home(names[0])
            made[carrier] = torch.stack([made[name] for name in names], axis)
        return made["q"], *(made[x] if self.parsed.home(x)[0] == x else None for x in "kv")

    def tensor(self, name: str, heads: int, dim: int, seed: int) -> Tensor:
        """One operand, or a gradient of the output (`q`)."""
        of_queries = name == "q"
        axes = self.parsed.q_format if of_queries else self.parsed.kv_format
        lens = self.lengths[0 if of_queries else 1]
        if axes == "thd":
            offsets = self.offsets(lens)
            sizes = {"t": offsets[-1] + (2 * GAP if self.gaps else 0), "h": heads, "d": dim}
        else:
            room = self.room[0 if of_queries else 1] if self.room else max(lens)
            sizes = {"b": len(lens), "s": room, "h": heads, "d": dim}
        x = oracle.randn(*(sizes[a] for a in axes), dtype=DTYPES[self.dtype], seed=seed)
        if axes != "thd" and not self.room:
            return x
        return torch.where(self.members(axes, lens, x), x, math.nan)

    def members(self, axes: str, lens: Sequence[int], x: Tensor) -> Tensor:
        """Which elements of an operand belong to a sequence."""
        found = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        for b, length in enumerate(lens):
            if axes == "thd":
                start = self.offsets(lens)[b]
                found[start : start + length] = True
            else:
                found.select(axes.index("b"), b).narrow(
                    axes.replace("b", "").index("s"), 0, length
                ).fill_(True)
        return found


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=oracle.DEVICE)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Makes new tensors NaN, whoever allocates them."""
    torch.use_deterministic_algorithms(True)
    try:
        with oracle.nan_filled_allocations():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(
    operands: Sequence[Tensor | None], d_o: Tensor, dlse: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, LSE and the gradients of the operands that are there, by the kernels."""
    given = [None if x is None else x.detach().requires_grad_() for x in operands]
    with poisoned_memory():
        out, aux = attngen.attention(
            *given, **{"deterministic": False, **arguments}, backend="cuda", return_lse=True
        )
        present = [x for x in given if x is not None]
        found = torch.autograd.grad([out, aux.lse], present, [d_o, dlse])
    return out.detach(), aux.lse.detach(), list(found)


def expected(
    operands: Sequence[Tensor | None],
    d_o: Tensor,
    dlse: Tensor,
    dtype: torch.dtype,
    **arguments: Any,
) -> list[Tensor]:
    """The gradients by the reference on tensors of that dtype."""
    given = [None if x is None else x.detach().to(dtype).requires_grad_() for x in operands]
    out, aux = reference.attention(*given, **arguments)
    present = [x for x in given if x is not None]
    return list(
        torch.autograd.grad([out, aux.lse], present, [d_o.to(dtype), dlse.to(aux.lse.dtype)])
    )


def check(call: Call, seed: int = 0, **more: Any) -> None:
    """Runs both directions on memory full of NaN and asserts the rules."""
    operands, arguments = call.operands(seed), call.arguments()
    d_o = call.tensor("q", call.heads[0], call.d_v or call.d, 3 * seed + 7)
    truth = oracle.truth(*operands, **arguments)
    dlse = oracle.randn(*truth.lse.shape, dtype=torch.float32, seed=seed + 9)
    rows = call.members(call.parsed.q_format, call.q_lens, d_o)[..., 0]
    order = [axis for axis in oracle.TO_BHSD[call.parsed.q_format] if axis < rows.ndim]
    if call.parsed.q_format == "thd" or call.room:
        dlse = torch.where(rows.permute(order), dlse, math.nan)
    out, lse, found = run(operands, d_o, dlse, **arguments, **more)
    oracle.check(out, lse, truth, call.layout)
    wanted = expected(operands, d_o, dlse, torch.float64, **arguments)
    rounded = expected(operands, d_o, dlse, d_o.dtype, **arguments)
    check_gradients(call, operands, found, wanted, rounded)


def check_gradients(
    call: Call,
    operands: Sequence[Tensor | None],
    found: Sequence[Tensor],
    wanted: Sequence[Tensor],
    rounded: Sequence[Tensor],
) -> None:
    """Asserts the rule of gradients.py for the gradient of each of q, k and v, wherever it is
    packed, and that what belongs to no sequence has exactly none."""
    carriers = [name for name, x in zip("qkv", operands, strict=True) if x is not None]

    def apart(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        named = dict(zip(carriers, tensors, strict=True))
        return layouts.unpack(call.parsed, *(named.get(name) for name in "qkv"))

    for operand, gradient in zip([x for x in operands if x is not None], found, strict=True):
        assert gradient.shape == operand.shape and gradient.is_contiguous()
    parts = zip("qkv", apart(found), apart(wanted), apart(rounded), strict=True)
    for name, gradient, truth, torch_s in parts:
        assert not gradient.isnan().any(), f"d{name}: {int(gradient.isnan().sum())} NaN"
        assert not gradient[(truth == 0).all(-1)].any(), f"d{name}: a gradient where there is none"
        error = oracle.largest((gradient.double() - truth).abs())
        limit = 4 * oracle.largest((torch_s.double() - truth).abs())
        limit += torch.finfo(gradient.dtype).eps / 2 * oracle.largest(truth.abs())
        assert error <= limit, f"d{name}: error {error:.3e} > {limit:.3e}"
