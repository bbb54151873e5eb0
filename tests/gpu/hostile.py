"""Calls whose integers in device tensors are garbage, between memory that nobody may touch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
from torch import Tensor

import attngen
from attngen.spec import layouts

from ..emulator.fences import Fences
from . import oracle
from .varlen import Call, int32

LOWEST, HIGHEST = -(1 << 31), (1 << 31) - 1
ZONE_BYTES = 1 << 16  # before and behind each tensor
TOLERANCE = 0.02  # of the largest gradient: sums of float32 come in any order


class Memory(Protocol):
    """Where the tensors of a call lie."""

    def empty_strided(
        self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor: ...
    def copy(self, tensor: Tensor) -> Tensor: ...
    def check(self) -> None:
        """Asserts that nothing was written outside of them."""


class Zones:
    """Tensors of a device, each in the middle of an allocation that is all 0xFF, NaN in every
    floating dtype."""

    def __init__(self) -> None:
        self._zones: list[Tensor] = []

    def empty_strided(
        self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        reach = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        size = (reach + 1) * dtype.itemsize if 0 not in sizes else 0
        whole = torch.full((2 * ZONE_BYTES + size,), 0xFF, dtype=torch.uint8, device=oracle.DEVICE)
        self._zones += [whole[:ZONE_BYTES], whole[ZONE_BYTES + size :]]
        inside = whole[ZONE_BYTES : ZONE_BYTES + size].view(dtype)
        return inside.as_strided(tuple(sizes), tuple(strides), inside.storage_offset())

    def copy(self, tensor: Tensor) -> Tensor:
        made = self.empty_strided(tensor.shape, tensor.stride(), tensor.dtype)
        return made.copy_(tensor) if tensor.numel() else made

    def check(self) -> None:
        assert all(bool((zone == 0xFF).all()) for zone in self._zones), "written outside"


class OnDevice:
    """Tensors of a device, each an allocation, whose bounds a tool looks at."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty_strided(
        self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=self._device)

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def check(self) -> None:
        torch.cuda.synchronize(self._device)


def memories() -> Iterator[Memory]:
    """Memories that show an access outside: of an emulated device exactly, at either end."""
    if oracle.DEVICE.type == "cuda":
        yield Zones()
        return
    for at_end in (True, False):
        yield Fences(at_end=at_end)


@contextmanager
def allocating(memory: Memory) -> Iterator[None]:
    """Outputs and workspaces of kernels lie in that memory."""
    name = "attngen.frontends.pytorch.operation._empty_strided_cuda"
    with mock.patch(name, memory.empty_strided):
        yield


class Claims(NamedTuple):
    """Claims of packed lengths about each sequence: where it begins, and how long it is."""

    starts: list[int]
    lengths: list[int]

    def tamed(self, tokens: int, longest: int) -> tuple[Claims, list[bool]]:
        """These claims, all sequences but the sane ones empty, and which these are: they lie in the
        tensor, behind those before them that do, and before those behind them that do."""
        spans = [*zip(self.starts, self.lengths, strict=True)]
        lies = [0 <= s <= tokens and 0 <= n <= min(tokens - s, longest) for s, n in spans]

        def follows(a: int, b: int) -> bool:
            return not (lies[a] and lies[b]) or sum(spans[a]) <= spans[b][0]

        pairs = [*itertools.combinations(range(len(spans)), 2)]
        out_of_order = {x for a, b in pairs if not follows(a, b) for x in (a, b)}
        sane = [ok and b not in out_of_order for b, ok in enumerate(lies)]
        starts, end = [], 0
        for ok, (start, length) in zip(sane, spans, strict=True):
            starts.append(start if ok else end)
            end = start + length if ok else end
        return Claims(
            starts, [n if ok else 0 for ok, n in zip(sane, self.lengths, strict=True)]
        ), sane


def claims_of(arguments: Mapping[str, Any], side: str) -> Claims:
    """Claims of a call's packed tokens."""
    ends = arguments[f"cu_seqlens_{side}"].tolist()
    starts = arguments.get(f"cu_seqlens_{side}_padded", arguments[f"cu_seqlens_{side}"]).tolist()
    return Claims(starts[:-1], [wrapped(b - a) for a, b in itertools.pairwise(ends)])


def wrapped(number: int) -> int:
    """The number as 32 signed bits have it."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def told(faults: Sequence[tuple[str, Any, int]]) -> str:
    """Some of them, and how many there are."""
    values = {LOWEST: "lowest", HIGHEST: "highest"}
    words = [
        f"{name.removeprefix('cu_seqlens_')}{str(index).replace(' ', '')}={values.get(x, x)}"
        for name, index, x in faults
    ]
    return "-".join([*words[:2], *[f"of{len(words)}"] * (len(words) > 2)])


@dataclass(frozen=True)
class Hostile:
    """A call, and which entries of its integers become what. `exact`: the same bits again."""

    call: Call
    faults: tuple[tuple[str, int, int], ...]
    deterministic: bool = False

    def __str__(self) -> str:
        return "-".join(
            (str(self.call), told(self.faults), *["deterministic"] * self.deterministic)
        )

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the call, both directions."""
        return dataclasses.replace(self.call.spec, deterministic=self.deterministic)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention`, faults and all."""
        found = self.call.arguments()
        for name, index, value in self.faults:
            found[name] = found[name].clone()
            found[name][index] = value
        return found

    def check(self, places: Sequence[Memory] = (), surely_wrong: bool = True) -> None:
        """Asserts that the call touches nothing but its operands, in each of these memories, or
        all, and that sane sequences have the results of a call in which all others are empty.
        surely_wrong: whether there must be others."""
        hostile = self.arguments()
        tamed, sane = self.tamed(hostile)
        if surely_wrong and self.faults:
            assert self.call.room or not all(sane.values()), "nothing is wrong"
        places = places or [*memories()]
        wanted = self.run(places[0], tamed)
        for memory in places:
            self.compare(self.run(memory, hostile), wanted, tamed, sane)

    def tamed(self, hostile: dict[str, Any]) -> tuple[dict[str, Any], dict[int, bool]]:
        """The arguments with none but sane sequences, and which these are."""
        found, sane = {**hostile}, dict.fromkeys(range(len(self.call.q_lens)), True)
        operands = self.call.operands()
        q, k, _ = layouts.unpack(self.call.parsed, *operands)
        for side, axes, x in zip(("q", "kv"), self.call.parsed.formats, (q, k), strict=True):
            name = f"cu_seqlens_{side}"
            if name in found and axes == "thd":
                mask = found.get("attn_mask")
                longest = x.shape[0] if mask is None else mask.shape[-2 if side == "q" else -1]
                claims, ok = claims_of(found, side).tamed(x.shape[0], longest)
                ends = (0, *itertools.accumulate(claims.lengths))
                found[name] = int32(ends)
                found[f"{name}_padded"] = int32([*claims.starts, x.shape[0]])
                sane = {b: sane[b] and ok[b] for b in sane}
            elif f"seqused_{side}" in found:
                room = x.shape[axes.index("s")]
                found[f"seqused_{side}"] = found[f"seqused_{side}"].clamp(0, room)
        return found, sane

    def run(self, memory: Memory, arguments: dict[str, Any]) -> list[Tensor]:
        """Output, LSE and the gradients of the operands, in that memory."""
        given = [None if x is None else self.filled(x) for x in self.call.operands()]
        trained = self.call.dtype != "e4m3"
        if not trained:
            given = [None if x is None else x.to(torch.float8_e4m3fn) for x in given]
        placed = [None if x is None else memory.copy(x).requires_grad_(trained) for x in given]
        placed_arguments = {
            name: memory.copy(x) if isinstance(x, Tensor) else x for name, x in arguments.items()
        }
        more = {"backend": "cuda", "return_lse": True}
        if trained:
            more["deterministic"] = self.deterministic
        with allocating(memory):
            out, aux = attngen.attention(*placed, **placed_arguments, **more)
            found = [out.detach(), aux.lse.detach()]
            if trained:
                d_v = self.call.d_v or self.call.d
                d_o = self.filled(self.call.tensor("q", self.call.heads[0], d_v, 7))
                present = [x for x in placed if x is not None]
                found += torch.autograd.grad(out, present, memory.copy(d_o))
        memory.check()
        return [x.to(oracle.DEVICE, copy=True) for x in found]

    def filled(self, x: Tensor) -> Tensor:
        """An operand, less the NaN that dense ones have where positions are not in use: lengths
        that count for all that there is room for reach these."""
        return x.detach().nan_to_num() if self.call.room else x.detach()

    def compare(
        self,
        found: list[Tensor],
        wanted: list[Tensor],
        tamed: Mapping[str, Any],
        sane: Mapping[int, bool],
    ) -> None:
        """Asserts that sane sequences have the same results."""
        parsed = self.call.parsed
        names = [name for name in "qkv" if parsed.home(name)[0] == name]

        def parts(results: list[Tensor]) -> list[Tensor]:
            gradients = dict(zip(names, results[2:], strict=False))
            apart = layouts.unpack(parsed, *(gradients.get(n) for n in "qkv")) if gradients else ()
            return [results[0], *apart]

        sides = ("q", "q", "kv", "kv")
        for b, ok in sane.items():
            if not ok:
                continue
            for index, (side, x, y) in enumerate(
                zip(sides, parts(found), parts(wanted), strict=False)
            ):
                rows = self.rows(tamed, side, b)
                a, c = x[rows].float(), y[rows].float()
                if index == 0 or self.deterministic:
                    assert torch.equal(a, c), f"sequence {b}: {('o', 'dq', 'dk', 'dv')[index]}"
                elif c.numel():
                    limit = TOLERANCE * float(c.abs().max()) + 1e-6
                    assert float((a - c).abs().max()) <= limit, f"sequence {b}: d{'oqkv'[index]}"
            axes = parsed.q_format
            positions = self.rows(tamed, "q", b)[0] if axes == "thd" else slice(None)
            lse = (x[:, positions] if axes == "thd" else x[b] for x in (found[1], wanted[1]))
            assert torch.equal(*lse), f"sequence {b}: lse"

    def rows(self, tamed: Mapping[str, Any], side: str, b: int) -> tuple[Any, ...]:
        """The index of a sequence in an operand of that side."""
        axes = self.call.parsed.q_format if side == "q" else self.call.parsed.kv_format
        if axes != "thd":
            return tuple({"b": b}.get(axis, slice(None)) for axis in axes)
        claims = claims_of(tamed, "q" if self.call.parsed.one_length else side)
        start, length = claims.starts[b], claims.lengths[b]
        return (slice(start, start + length),)


@dataclass(frozen=True)
class HostilePages:
    """Queries over pages of so many positions, split or as prompts (no `splits`), whose lengths in
    use and whose table have entries that become others: a name, an index, a value each. `reach`:
    keys of an arbitrary mask, less than pages have room for."""

    faults: tuple[tuple[str, tuple[int, ...], int], ...]
    splits: int = 0
    packed: bool = False
    page: int = 16
    kv_dtype: str = ""
    d: int = 64
    reach: int = 0

    def __str__(self) -> str:
        kind = f"pages{self.page}-d{self.d}-splits{self.splits}" + "-packed" * self.packed
        kind += f"-reach{self.reach}" * bool(self.reach)
        return "-".join((kind, *filter(None, [self.kv_dtype]), told(self.faults)))

    @property
    def layout(self) -> str:
        return f"paged_kv_{'thd' if self.packed else 'bshd'}_bshd_bshd"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the call."""
        return attngen.AttentionSpec(
            self.d, layout=self.layout, mask="causal", decode=self.splits > 0,
            kv_dtype=self.kv_dtype or None, directions=("fwd",), attn_mask=self.reach > 0,
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Every tensor of the call, as it should be."""
        width, queries = 5, 3 if self.splits else 70
        k, v = (oracle.randn(4 * width, self.page, 2, self.d, seed=n) for n in (1, 2))
        if self.kv_dtype:
            k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        lengths = [width * self.page, self.page + 1, 0, 2 * self.page]
        lengths = [min(length, self.reach or length) for length in lengths]
        table = torch.randperm(4 * width, generator=torch.Generator().manual_seed(0)).int()
        shape = (4 * queries, 8, self.d) if self.packed else (4, queries, 8, self.d)
        found: dict[str, Any] = {
            "q": oracle.randn(*shape, seed=3), "k": k, "v": v, "seqused_kv": int32(lengths),
            "page_table": int32(table.tolist()).view(4, width),
            "layout": self.layout, "mask": "causal_bottom_right",
        }  # fmt: skip
        if self.kv_dtype:
            one = torch.ones(1, device=oracle.DEVICE)
            found |= {"descale_k": one, "descale_v": one}
        if self.reach:
            shape = (4, 8, queries, self.reach)
            found["attn_mask"] = oracle.randn(*shape, dtype=torch.float32, seed=4) > -0.5
        if self.packed:
            found["cu_seqlens_q"] = int32([queries * b for b in range(5)])
        if self.splits:
            found["num_splits"] = self.splits
        return found

    def check(self, places: Sequence[Memory] = ()) -> None:
        """Asserts that the call touches nothing but its operands, in each of these memories, or
        all, and that sequences without a wrong entry have the results that they have beside right
        ones."""
        arguments, places = self.arguments(), places or [*memories()]
        wanted = self.run(arguments, places[0])
        wrong = set()
        for name, index, value in self.faults:
            arguments[name] = arguments[name].clone()
            arguments[name][index] = value
            wrong |= {index[0] - 1, index[0]} if name == "cu_seqlens_q" else {index[0]}
        queries = arguments["q"].shape[0] // 4
        for memory in places:
            found = self.run(arguments, memory)
            for b in {0, 1, 2, 3} - wrong:
                rows = slice(queries * b, queries * (b + 1)) if self.packed else b
                assert torch.equal(found[rows], wanted[rows]), f"sequence {b}"

    def run(self, arguments: dict[str, Any], memory: Memory) -> Tensor:
        """The output, in that memory."""
        placed = {n: memory.copy(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        with torch.no_grad(), allocating(memory):
            out = attngen.attention(**placed, backend="cuda")
        memory.check()
        return out.to(oracle.DEVICE, copy=True)
