"""Masks of transformers as arguments of attention: recognised by how their functions are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import Schedule
from .left_padded import Kept

_HOME = "transformers.masking_utils"


@dataclass(frozen=True, eq=False)
class Structure:
    """The parts of a mask: keys visible before and behind each query's own, None for all; the size
    of chunks; the document of each row, [b, s], and whether positions count within documents; the
    block of each row, [b, s], negative for none, whose keys are visible beside these of the band,
    and keys before and behind that neither reaches.
    """

    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None
    counts_within: bool = False
    blocks: Tensor | None = None
    cut: tuple[int | None, int | None] = (None, None)

    @property
    def has_diagonal(self) -> bool:
        """Whether it depends on where queries stand among the keys."""
        return not self.left is self.right is self.chunk is None

    def and_also(self, other: Structure) -> Structure | None:
        """The intersection with another; None where these parts cannot say it."""
        twice = None not in (self.chunk, other.chunk) or None not in (
            self.documents,
            other.documents,
        )
        if twice:
            return None
        if self.has_blocks or other.has_blocks:
            return self._and_blocks(other) if self.has_blocks else other._and_blocks(self)
        return Structure(
            _smaller(self.left, other.left),
            _smaller(self.right, other.right),
            self.chunk if other.chunk is None else other.chunk,
            self.documents if other.documents is None else other.documents,
            self.counts_within or other.counts_within,
        )

    def _and_blocks(self, other: Structure) -> Structure | None:
        """The intersection of one with blocks and one that may cut these."""
        if other.has_blocks or other.chunk is not None:
            return None
        left, right = self.cut
        return replace(
            self,
            cut=(_smaller(left, other.left), _smaller(right, other.right)),
            documents=self.documents if other.documents is None else other.documents,
            counts_within=self.counts_within or other.counts_within,
        )

    @property
    def has_blocks(self) -> bool:
        """Whether keys of a query's own block are visible whatever the band hides."""
        return self.blocks is not None

    def or_blocks(self, other: Structure) -> Structure | None:
        """The union with blocks alone; None where these parts cannot say it. Whatever sees all keys
        sees those of its block."""
        others = (self.chunk, self.documents, self.blocks, other.documents, *other.cut)
        plain = other.has_blocks and not other.has_diagonal
        if not plain or any(x is not None for x in others):
            return None
        return replace(self, blocks=other.blocks) if self.has_diagonal else self


def _smaller(one: int | None, other: int | None) -> int | None:
    sizes = [x for x in (one, other) if x is not None]
    return min(sizes) if sizes else None


def structure_of(function: Callable[..., Any]) -> Structure | None:
    """The structure of a mask function of transformers; None where it has parts of other kinds."""
    if getattr(function, "__module__", "") != _HOME:
        return None
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars
    held = dict(zip(names, [cell.cell_contents for cell in cells], strict=True))
    maker, _, inner = function.__qualname__.partition(".<locals>.")
    match maker:
        case "causal_mask_function":
            return Structure(right=0)
        case "bidirectional_mask_function":
            return Structure()
        case "sliding_window_overlay":
            return Structure(left=held["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return Structure(left=held["sliding_window"], right=held["sliding_window"])
        case "chunked_overlay":
            return Structure(chunk=held["chunk_size"])
        case "packed_sequence_mask_function":
            return Structure(documents=held["packed_sequence_mask"])
        case "blockwise_overlay":
            return Structure(blocks=held["block_sequence_ids"])
        case "remap_positions_for_packed_sequence":
            found = structure_of(held["mask_function"])
            others = () if found is None else (found.chunk, found.documents, found.blocks)
            if found is None or any(x is not None for x in others):
                return None
            return Structure(found.left, found.right, counts_within=True)
        case "and_masks":
            return _joined([structure_of(each) for each in held["mask_functions"]])
        case "or_masks":
            return _united([structure_of(each) for each in held["mask_functions"]])
    return None


def _joined(parts: list[Structure | None]) -> Structure | None:
    whole: Structure | None = Structure()
    for part in parts:
        if whole is None or part is None:
            return None
        whole = whole.and_also(part)
    return whole


def _united(parts: list[Structure | None]) -> Structure | None:
    match parts:
        case [Structure() as band, Structure() as blocks]:
            return band.or_blocks(blocks)
    return None


@dataclass(frozen=True, eq=False)
class Request:
    """A mask that transformers asks for: sizes, where queries and keys stand, its function, and the
    padding mask, bool [b, n], of all tokens so far. rest: whatever else it says."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    mask_function: Callable[..., Any]
    attention_mask: Tensor | None
    device: Any
    rest: dict[str, Any] = field(default_factory=dict)

    def dense(self) -> Tensor:
        """The mask itself, bool [b, 1, q, kv], as transformers makes it."""
        from transformers import masking_utils

        make: Any = masking_utils.sdpa_mask
        found: Tensor = make(
            batch_size=self.batch_size,
            q_length=self.q_length,
            kv_length=self.kv_length,
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
            mask_function=self.mask_function,
            attention_mask=self.attention_mask,
            device=self.device,
            **self.rest | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
        return found

    def of_all(self, number: int | Tensor) -> Tensor:
        """A number for each sequence, int32 [b], contiguous: layers would copy it else."""
        if isinstance(number, Tensor):
            return number.to(torch.int32).reshape(-1).expand(self.batch_size).contiguous()
        return torch.full((self.batch_size,), number, dtype=torch.int32, device=self.device)


@dataclass(frozen=True, eq=False)
class PlannedMask:
    """A mask on its way through a model, in place of a tensor [b, 1, q, kv], which it becomes for
    code that slices it, joins it with others, or asks for what only tensors have.

    arguments: of `attention`, that say the same; ends: cumulative lengths of documents in all rows,
    which are packed tokens then; None for dense sequences. lengths: of sequences behind padding, as
    packed tokens, by their sizes: its layers make them once.
    """

    request: Request
    arguments: dict[str, Any]
    ends: Tensor | None = None
    lengths: Kept = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the tensor that it stands for."""
        return self.request.batch_size, 1, self.request.q_length, self.request.kv_length

    @property
    def ndim(self) -> int:
        """Axes of the tensor that it stands for."""
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked of objects of any kind
            raise AttributeError(f"PlannedMask has no attribute {name!r}")
        return getattr(self.request.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.request.dense()[index]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = {name: _as_tensors(x) for name, x in (kwargs or {}).items()}
        return function(*_as_tensors(args), **named)


def _as_tensors(x: Any) -> Any:
    """An argument of a function of torch whose plans are tensors."""
    if isinstance(x, PlannedMask):
        return x.request.dense()
    return type(x)(map(_as_tensors, x)) if type(x) in (tuple, list) else x


def plan_of(request: Request) -> PlannedMask | None:
    """The plan of a mask; None where only the tensor says it."""
    found = structure_of(request.mask_function)
    if found is None or found.counts_within != (found.documents is not None):
        return None
    if found.has_blocks:
        return _of_blocks(request, found)
    chunk = {} if found.chunk is None else {"chunked": found.chunk}
    masks = [*(["causal"] if found.right == 0 else []), *chunk]
    arguments: dict[str, Any] = {"mask": "+".join(masks) or "none", **chunk}
    sides = found.left, found.right or None  # a causal mask has its own
    if sides != (None, None):
        arguments["window"] = tuple(-1 if x is None else x for x in sides)
    if found.documents is not None:
        return PlannedMask(request, arguments, _ends_of(found.documents))
    if found.chunk is not None and request.kv_offset:
        return None  # chunks count from the first key
    placed = _placed(request, found)
    if placed is None or (found.chunk is not None and "positions" in placed):
        return None  # chunks have no diagonal of their own place
    return PlannedMask(request, arguments | placed)


def _of_blocks(request: Request, found: Structure) -> PlannedMask | None:
    """The plan of a mask with blocks, as a function of positions that all layers share; None of a
    single query, whose mask is small."""
    if request.q_length == 1 or isinstance(request.q_offset, Tensor):
        return None
    function = blockwise(found, request.q_offset, request.kv_offset, _holes(request))
    return PlannedMask(request, {"mask_mod": function, "schedule": Schedule()})


def blockwise(
    found: Structure, q_offset: int, kv_offset: int, tokens: Tensor | None
) -> Callable[..., Tensor]:
    """A `mask_mod` of attention that says a structure with blocks. tokens: the keys of each
    sequence that take part, bool [b, n], None for all."""
    # Numbers and tensors alone: attention knows such a function again at once.
    blocks, documents, left, right = found.blocks, found.documents, found.left, found.right
    cut_left, cut_right = found.cut
    assert blocks is not None  # the caller's condition

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row, key = i + q_offset, j + kv_offset
        band = None if left is None else key >= row - left
        if right is not None:
            ahead = key <= row + right
            band = ahead if band is None else band & ahead
        group = blocks[b, row]
        seen = (group == blocks[b, key]) & (group >= 0)
        seen = seen if band is None else seen | band
        if cut_left is not None:
            seen = seen & (key >= row - cut_left)
        if cut_right is not None:
            seen = seen & (key <= row + cut_right)
        if documents is not None:
            seen = seen & (documents[b, row] == documents[b, key])
        return seen if tokens is None else seen & tokens[b, key]

    return mask_mod


def _holes(request: Request) -> Tensor | None:
    """Which keys are tokens, bool [b, n], also of rows that a mask of padding does not reach; None
    where all are. It waits for the device once."""
    mask = request.attention_mask
    end = request.kv_offset + request.kv_length
    if mask is None or (mask.shape[-1] >= end and bool(mask.all())):
        return None
    return pad(mask.bool(), (0, max(0, end - mask.shape[-1])))


def _ends_of(documents: Tensor) -> Tensor:
    """Cumulative lengths, int32, of the documents in all rows, one sequence behind the other."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return pad(first.flatten().nonzero().flatten(), (0, 1), value=documents.numel()).to(torch.int32)


def _placed(request: Request, found: Structure) -> dict[str, Any] | None:
    """Arguments that say where keys begin and end, and where the diagonal is; None where the
    padding has holes, or where queries behind it see keys behind the last of them."""
    padding = _padding(request)
    if padding is None:
        return None
    begins, ends = padding
    if not found.has_diagonal:
        return {"seqstart_kv": begins, "seqused_kv": ends}
    delta = request.q_offset - request.kv_offset
    s_q, s_kv = request.q_length, request.kv_length
    if begins is not None:
        if found.right != 0 and (isinstance(delta, Tensor) or delta + s_q != s_kv):
            return None
        return _behind_padding(request, delta, begins, ends)
    if isinstance(delta, Tensor):  # a cache of fixed size, of which later rows are empty
        if found.right != 0 or ends is not None:
            return None
        return {"bottom_right": True, "seqused_kv": request.of_all(delta + s_q)}
    if ends is not None:
        return {"positions": (delta, 0), "seqused_kv": ends} if delta else {"seqused_kv": ends}
    if delta == s_kv - s_q:
        return {"bottom_right": True}
    if delta == 0:
        return {}
    if found.right == 0 and 0 <= delta + s_q <= s_kv:
        return {"bottom_right": True, "seqused_kv": request.of_all(delta + s_q)}
    return {"positions": (delta, 0)}


def _behind_padding(
    request: Request, delta: int | Tensor, begins: Tensor, ends: Tensor | None
) -> dict[str, Any]:
    """Lengths of both sides where sequences begin behind padding: rows of queries that are padding
    are left out, so that the last one sees the last key."""
    s_q = request.q_length
    last = request.of_all(delta + s_q)
    ends = last if ends is None else torch.minimum(ends, last)
    given = {"bottom_right": True, "seqstart_kv": begins, "seqused_kv": ends}
    if s_q > 1:
        given["seqstart_q"] = (begins - delta).clamp(0, s_q)
        given["seqused_q"] = (ends - delta).clamp(0, s_q)
    return given


def _padding(request: Request) -> tuple[Tensor | None, Tensor | None] | None:
    """Where the tokens of each sequence begin and end among its keys, int32 [b] each, None where
    all begin or end as the keys do; None alone where the padding has holes. It waits for the device
    once, behind padding twice."""
    mask = request.attention_mask
    if mask is None:
        return None, None
    offset, room = request.kv_offset, request.kv_length
    whole = mask[:, offset : offset + room]
    if bool(whole.all()):  # as of most batches, in one kernel
        width = whole.shape[-1]
        return None, None if width >= room else request.of_all(width)
    tokens = whole.sum(-1)
    begins = whole.int().argmax(-1)  # the first of them; 0 where there is none
    ends = begins + tokens
    there = torch.arange(whole.shape[-1], device=mask.device)
    between = (there >= begins[:, None]) & (there < ends[:, None])
    facts = torch.stack([(between == whole).all(), (begins > 0).any(), (ends < room).any()])
    plain, begins_late, ends_early = facts.tolist()
    if not plain:
        return None
    return (
        begins.to(torch.int32) if begins_late else None,
        ends.to(torch.int32) if ends_early else None,
    )
