"""Calls of any layout and lengths, and both directions of one held to the float64 rules."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec
from attngen.fragments import features
from attngen.kernels.plan import plan
from attngen.spec import layouts, resolve
from attngen.spec.attention_spec import MAX_TRAINED_HEAD_DIM

from . import oracle, oracle_fp8, variants
from .cases import DTYPES
from .directions import expected, int32, loosen, poisoned_memory, run

GAP = 5  # tokens between sequences, where there are gaps


@dataclass(frozen=True)
class Features:
    """Features of a call beside masks of ranges. `alibi`: whose slopes, `default` or own, [h] or
    [b, h]; `seen`: the share of an arbitrary mask that takes part, 0 without one; `bias`: its type,
    of the broadcast `bias_shape`; `positions`: of its first query and key in longer sequences."""

    alibi: str = ""
    softcap: float = 0.0
    softmax: str = "vanilla"
    dropout: float = 0.0
    seen: float = 0.0
    max_logit: bool = False
    bias: str = ""
    bias_shape: str = "1hss"
    positions: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = (
            f"{self.bias}_{self.bias_shape}" * bool(self.bias),
            f"alibi_{self.alibi}" * bool(self.alibi),
            f"cap{self.softcap:g}" * bool(self.softcap),
            self.softmax * (self.softmax != "vanilla"),
            f"drop{self.dropout:g}" * bool(self.dropout),
            f"seen{self.seen:g}" * bool(self.seen),
            "max" * self.max_logit,
            "-".join(("at", *map(str, self.positions))) * bool(self.positions),
        )
        return "-".join(filter(None, words))

    def fields(self) -> dict[str, Any]:
        """The fields of the spec that has these features."""
        return {
            "alibi": bool(self.alibi), "softcap": self.softcap > 0, "softmax": self.softmax,
            "dropout": self.dropout > 0, "attn_mask": self.seen > 0,
            "return_max_logit": self.max_logit, "bias": self.bias or "none",
            "positions": bool(self.positions),
        }  # fmt: skip

    def arguments(
        self, batch: int, heads: int, reach: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, Any]:
        """Keyword arguments of `attention`, whose mask and bias (of q's dtype) reach so many
        queries and keys."""
        found = variants.score_arguments(self.alibi, self.softcap, self.softmax, batch, heads)
        if self.dropout:
            state = torch.tensor((0x123456789ABCDEF, 2**40 + 5), device=oracle.DEVICE)
            found |= {"dropout_p": self.dropout, "rng_state": state}
        if self.seen:
            drawn = oracle.randn(batch, heads, *reach, dtype=torch.float32, seed=9)
            found["attn_mask"] = torch.special.ndtr(drawn) < self.seen
        if self.bias:
            full = zip(self.bias_shape, (batch, heads, *reach), strict=True)
            sizes = [1 if letter == "1" else n for letter, n in full]
            found["bias"] = oracle.randn(*sizes, dtype=dtype, seed=11)
            found["bias_type"] = self.bias
        if self.positions:
            found["positions"] = self.positions
        return found


@dataclass(frozen=True)
class Call:
    """One call. `q_lens`, `kv_lens`: a length a sequence; of a dense side with `room`, positions in
    use of so many. `gaps`: packed sequences lie apart, and tokens before and after them belong to
    none. `loose`: how operands and gradients lie that the copy engine cannot read, as `loosen` has
    it."""

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
    loose: str = ""
    cumulative: bool = False  # whether dense sides tell their lengths by cu_seqlens
    more: Features = Features()

    def __str__(self) -> str:
        lengths = f"{len(self.q_lens)}x{max(self.q_lens)}"
        window = "" if self.window == (-1, -1) else f"-w{self.window[0]},{self.window[1]}"
        head = f"{self.layout}-{lengths}-d{self.d}x{self.d_v or self.d}-{self.mask}{window}"
        head += ("-gaps" if self.gaps else "") + ("-room" if self.room else "")
        head += f"-{self.loose}" * bool(self.loose)
        return "-".join((head, *filter(None, [str(self.more)])))

    @property
    def parsed(self) -> layouts.Layout:
        return layouts.parse(self.layout)

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths of Q, and of K and V."""
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
            gather=bool(self.loose),
            directions=("fwd",) if self.dtype == "e4m3" or not self.trains else ("fwd", "bwd"),
            **self.more.fields(),
        )

    @property
    def trains(self) -> bool:
        """Whether kernels of its head dims have a backward."""
        return max(self.d, self.d_v or 0) <= MAX_TRAINED_HEAD_DIM

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
        # What a mask says of positions: as many as a dense side has, else as its longest sequence.
        reach = tuple(
            room if self.room and axes != "thd" else max(lens)
            for axes, lens, room in zip(
                self.parsed.formats, self.lengths, self.room or (0, 0), strict=True
            )
        )
        dtype = DTYPES.get(self.dtype, torch.bfloat16)
        return found | self.more.arguments(len(self.q_lens), self.heads[0], reach, dtype)

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
        dtype = DTYPES.get(self.dtype, torch.bfloat16)  # 8 bits are made of 16
        x = oracle.randn(*(sizes[a] for a in axes), dtype=dtype, seed=seed)
        if axes != "thd" and not self.room:
            return x
        return torch.where(self.members(axes, lens, x), x, math.nan)

    def place(self, axes: str, lens: Sequence[int], b: int) -> tuple[Any, ...]:
        """The index of the positions of sequence b in an operand."""
        start = self.offsets(lens)[b] if axes == "thd" else 0
        positions = slice(start, start + lens[b])
        index = {"t": positions, "s": positions, "b": b}
        return tuple(index.get(axis, slice(None)) for axis in axes)

    def alone(self, b: int) -> dict[str, Any]:
        """Keyword arguments of `attention` on sequence b alone, dense."""
        found = self.arguments()
        found = {n: x for n, x in found.items() if not n.startswith(("cu_", "seqused", "layout"))}
        found["mask"] = self.mask.replace("padding_", "").replace("padding", "none")
        if self.more.alibi == "bh":
            found["alibi_slopes"] = found["alibi_slopes"][b].contiguous()
        q_len, kv_len = (lens[b] for lens in self.lengths)
        own = (slice(b, b + 1), slice(None), slice(q_len), slice(kv_len))
        for name in ("attn_mask", "bias"):
            if (x := found.get(name)) is not None:
                sizes = zip(own, x.shape, strict=True)
                found[name] = x[tuple(slice(None) if n == 1 else part for part, n in sizes)]
        return found

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


def check(call: Call, seed: int = 0, **more: Any) -> None:
    """Runs both directions on memory full of NaN and asserts the rules; by the backward's kernels
    for narrow windows and by the others, where there are both."""
    orders = 1
    if not more.get("deterministic") and call.dtype != "e4m3":
        spec = dataclasses.replace(call.spec, directions=("bwd",))
        orders = len(resolve.resolve(spec, features.scan()))
    for narrow in (False, True)[:orders]:
        with oracle.narrow_windows(narrow):
            _check(call, seed, **more)


def check_forward(call: Call, seed: int = 0, **more: Any) -> None:
    """Runs the forward alone on memory full of NaN and asserts the rules."""
    operands, arguments = call.operands(seed), call.arguments()
    expected = oracle.truth(*operands, **arguments)
    placed = [None if x is None else loosen(x, call.loose) for x in operands]
    results = {"return_lse": True, "return_max_logit": call.more.max_logit, "backend": "cuda"}
    with poisoned_memory():
        out, aux = attngen.attention(*placed, **arguments, **results, **more)
    oracle.check(out, aux.lse, expected, call.layout)
    if call.more.max_logit:
        variants.check_max_logit(aux.max_logit, *operands, arguments, False)


def _check(call: Call, seed: int, **more: Any) -> None:
    operands, arguments = call.operands(seed), call.arguments()
    d_o = call.tensor("q", call.heads[0], call.d_v or call.d, 3 * seed + 7)
    truth = oracle.truth(*operands, **arguments)
    dlse = oracle.randn(*truth.lse.shape, dtype=torch.float32, seed=seed + 9)
    rows = call.members(call.parsed.q_format, call.q_lens, d_o)[..., 0]
    order = [axis for axis in oracle.TO_BHSD[call.parsed.q_format] if axis < rows.ndim]
    if call.parsed.q_format == "thd" or call.room:
        dlse = torch.where(rows.permute(order), dlse, math.nan)
    if call.more.max_logit:
        placed = (None if x is None else loosen(x, call.loose) for x in operands)
        with torch.no_grad():
            _, aux = attngen.attention(
                *placed, **arguments, **more, return_max_logit=True, backend="cuda"
            )
        variants.check_max_logit(aux.max_logit, *operands, arguments, False)
    out, lse, found = run(operands, d_o, dlse, loose=call.loose, **arguments, **more)
    oracle.check(out, lse, truth, call.layout)
    wanted = expected(operands, d_o, dlse, torch.float64, **arguments)
    rounded = expected(operands, d_o, dlse, d_o.dtype, **arguments)
    if "bias" in arguments:
        check_bias_gradient(found.pop(), wanted.pop(), rounded.pop())
    if "sink" in arguments:
        variants.check_sink_gradient(found.pop(), wanted.pop(), truth, arguments, d_o, dlse)
        rounded.pop()
    check_gradients(call, operands, found, wanted, rounded)
    if more.get("deterministic"):
        again = run(operands, d_o, dlse, loose=call.loose, **arguments, **more)
        assert oracle.same(found, again[2][: len(found)])


def check_bias_gradient(found: Tensor, truth: Tensor, rounded: Tensor) -> None:
    """Asserts the rule of gradients.py, and that what no sequence reads has none."""
    assert found.shape == truth.shape and found.dtype == rounded.dtype
    assert not found.isnan().any(), f"dbias: {int(found.isnan().sum())} NaN"
    error = oracle.largest((found.double() - truth).abs())
    limit = 4 * oracle.largest((rounded.double() - truth).abs())
    limit += torch.finfo(found.dtype).eps / 2 * oracle.largest(truth.abs())
    assert error <= limit, f"dbias: error {error:.3e} > {limit:.3e}"


def _alike(call: Call) -> bool:
    """Whether the kernel of dense calls has the same tiles: sums are cut where blocks end."""
    spec = call.spec
    mask = spec.mask.replace("padding_", "").replace("padding", "none")
    dense = dataclasses.replace(spec, layout="bshd", seqused=False, mask=mask)
    problems = (resolve.resolve(each, features.scan())[0] for each in (spec, dense))
    return len({plan(problem, "sm_90a").tile for problem in problems}) == 1


def check_alone(call: Call) -> None:
    """Asserts that a forward in 8 bits gives each sequence the bits that it has alone, or, where
    dense calls have other tiles, what the rule allows. Beside dropout, which follows from a
    sequence's number, alone is the last of so many that are like it."""
    alike = _alike(call)
    operands = [None if x is None else x.to(torch.float8_e4m3fn) for x in call.operands()]
    results = {"backend": "cuda", "return_lse": True, "return_amax": True}
    results["return_max_logit"] = call.more.max_logit
    out, aux = attngen.attention(*operands, **call.arguments(), **results)
    members = call.members(call.parsed.q_format, call.q_lens, out)
    assert not out[~members].any() and not out.isnan().any()
    largest, amax = [], torch.zeros(1, device=out.device)
    for b in range(len(call.q_lens)):
        rows, keys = (call.place(axes, lens, b) for axes, lens in
                      zip(call.parsed.formats, call.lengths, strict=True))  # fmt: skip
        alone = [operands[0][rows], *(x[keys] for x in operands[1:])]
        start = call.offsets(call.q_lens)[b] if call.layout == "thd" else 0
        lse = aux.lse if call.layout == "thd" else aux.lse[b]
        lse = lse[:, start : start + call.q_lens[b]]
        axes = call.parsed.q_format.replace("t", "s").replace("b", "")
        batch = 0 if call.parsed.q_format == "thd" else call.parsed.q_format.index("b")
        layout = axes[:batch] + "b" + axes[batch:]
        count = b + 1 if call.more.dropout else 1
        alone = [x.unsqueeze(batch).repeat_interleave(count, batch) for x in alone]
        if not alike and all(x.numel() for x in alone):
            expected = oracle_fp8.truth(*alone, **call.alone(b), layout=layout).last(batch)
            oracle_fp8.check(out[rows].unsqueeze(batch), lse[None], expected, layout)
            continue
        wanted, by = attngen.attention(*alone, **results, **call.alone(b), layout=layout)
        assert torch.equal(out[rows], wanted.select(batch, -1))
        assert torch.equal(lse, by.lse[-1])
        amax = torch.maximum(amax, by.amax_o)
        largest.append(by.max_logit)
    assert aux.amax_s.item() == 1.0
    if alike and not call.more.dropout:  # of those before the last, too
        assert torch.equal(aux.amax_o, amax)
    if alike and call.more.max_logit:
        assert torch.equal(aux.max_logit, torch.stack(largest).amax(0))


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
