"""Appends to a cache: their arguments, and why a call of them cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..fragments import features
from ..io.text import quoted
from ..spec.attention_spec import DTYPES_8BIT, DTYPES_16BIT, AttentionSpec
from ..spec.attention_spec import dtype_name as spec_dtype
from ..spec.resolve import find_violations
from .tensors import Described, dtype_name, is_contiguous, is_fp8, named

_FEATURES = features.scan()  # here, not in a call: torch.compile cannot trace file access
LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")
TOKENS, CACHES = ("k", "v", "q"), ("k_cache", "v_cache")
INTEGERS = ("lengths", "cu_seqlens", "cu_seqlens_all", "page_table")
TABLES, SCALES = ("rotary_cos", "rotary_sin"), ("scale_k", "scale_v")
TENSORS = (*CACHES, "k", "v", *INTEGERS, "q", *TABLES, *SCALES)
ROTARY_STEP = 16  # columns, of which a multiple turns


@dataclass(slots=True)
class AppendCall:
    """Arguments of `append_kv`: tensors of any library, or descriptions of them."""

    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    lengths: Any = None
    layout: str = "bshd"
    cu_seqlens: Any = None
    cu_seqlens_all: Any = None
    page_table: Any = None
    q: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_interleaved: bool = False
    rotary_at_start: bool = False
    scale_k: Any = None
    scale_v: Any = None
    backend: str = "auto"

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors of the call by their names, None for those that it does not have."""
        return {name: getattr(self, name) for name in TENSORS}

    @property
    def present(self) -> dict[str, Any]:
        """The tensors of the call that it has."""
        return {name: x for name, x in self.tensors.items() if x is not None}

    def size(self, axis: str) -> int:
        """Sequences, new tokens of each, tokens, or heads of keys: an axis of the new keys."""
        return int(self.k.shape[self.layout.index(axis)])

    @property
    def sequences(self) -> int:
        """Sequences of the call."""
        return len_of(self.cu_seqlens) - 1 if self.layout == "thd" else self.size("b")


def len_of(tensor: Described) -> int:
    """Elements of the first axis."""
    return int(tensor.shape[0])


def violations(call: AppendCall) -> list[str]:
    """Why a call cannot be: every reason."""
    if call.layout not in LAYOUTS:
        return [f"layout {call.layout!r}; allowed: {', '.join(LAYOUTS)}"]
    if others := [name for name, x in call.present.items() if not hasattr(x, "ndim")]:
        given = call.present
        return [f"{name} needs a tensor; got {quoted(given[name])}. Pass one." for name in others]
    ranks = {name: 4 for name in CACHES} | {name: len(call.layout) for name in TOKENS}
    found = [
        f"{name} has {ranks[name]} axes; got {named(x)}"
        for name, x in call.present.items()
        if ranks.get(name, x.ndim) != x.ndim
    ]
    if found:
        return found
    if call.layout == "thd" and call.cu_seqlens is None:
        return ["layout 'thd' needs cu_seqlens, the cumulative numbers of new tokens"]
    return [
        *_of_tokens(call),
        *_of_integers(call),
        *rotation_violations(call),
        *_of_dtypes(call),
    ]


def _of_tokens(call: AppendCall) -> Iterator[str]:
    axes, k, v, q = call.layout, call.k, call.v, call.q
    if tuple(k.shape[:-1]) != tuple(v.shape[:-1]):
        yield f"k and v differ in more than their head dims: {named(k)}, {named(v)}"
    heads = axes.index("h")
    if q is not None and [*q.shape[:heads], *q.shape[heads + 1 :]] != [
        *k.shape[:heads],
        *k.shape[heads + 1 :],
    ]:
        yield f"q differs from k in more than its heads: {named(q)}, {named(k)}"
    if tuple(call.k_cache.shape[:3]) != tuple(call.v_cache.shape[:3]):
        yield f"caches differ in more than their head dims: {_pair(call.k_cache, call.v_cache)}"
    for cache, new in (("k_cache", k), ("v_cache", v)):
        rows = getattr(call, cache)
        if tuple(rows.shape[2:]) != (call.size("h"), new.shape[-1]):
            yield f"{cache} needs heads of {call.size('h')}, {new.shape[-1]}; got {named(rows)}"
    if not call.k_cache.shape[1]:
        yield f"caches need a row a page, or more; got {_pair(call.k_cache, call.v_cache)}"
    pages = len_of(call.k_cache)
    if call.page_table is None and call.sequences > pages:
        yield f"{call.sequences} sequences in a cache of {pages}; without page_table each has a row"


def _of_integers(call: AppendCall) -> Iterator[str]:
    if (call.lengths is None) == (call.cu_seqlens_all is None):
        yield "one of lengths and cu_seqlens_all says how many tokens there are before"
    b = call.sequences
    for name in INTEGERS:
        x = getattr(call, name)
        if x is None:
            continue
        least = b if name in ("lengths", "page_table") else b + 1
        exact = name == "cu_seqlens" and call.layout == "thd"
        rank = 2 if name == "page_table" else 1
        if x.ndim != rank or not (len_of(x) == least if exact else len_of(x) >= least):
            yield f"{name} needs [{least}{', n' * (rank - 1)}] or more; got {named(x)}"
        elif dtype_name(x) != "int32":
            yield f"{name} needs int32; got {named(x)}"
        elif x.stride()[-1] != 1 and x.shape[-1] > 1:
            yield f"{name} needs its last axis contiguous; got strides {list(x.stride())}"


def rotation_violations(call: AppendCall) -> Iterator[str]:
    """Why the angles of a call are none for its keys."""
    cosines, sines = call.rotary_cos, call.rotary_sin
    if (cosines is None) != (sines is None):
        yield "rotary_cos and rotary_sin come together"
        return
    if cosines is None:
        if call.q is not None:
            yield "q is rotated, and there is no rotary_cos"
        return
    if tuple(cosines.shape) != tuple(sines.shape) or cosines.ndim != 2 or not len_of(cosines):
        yield f"rotary tables need one shape, [positions, w / 2]; got {_pair(cosines, sines)}"
        return
    width = 2 * cosines.shape[1]
    if width % ROTARY_STEP or not width <= call.k.shape[-1]:
        yield (
            f"rotary_cos turns {width} columns: a multiple of {ROTARY_STEP}, up to the "
            f"{call.k.shape[-1]} of keys"
        )
    kinds = {dtype_name(x) for x in (cosines, sines)}
    if len(kinds) > 1 or not kinds <= {"float32", dtype_name(call.k)}:
        yield f"rotary tables need float32, or the dtype of k; got {_pair(cosines, sines)}"
    if not (is_contiguous(cosines) and is_contiguous(sines)):
        yield "rotary_cos and rotary_sin need to be contiguous"


def _of_dtypes(call: AppendCall) -> Iterator[str]:
    kinds = {name: dtype_name(call.present[name]) for name in TOKENS if name in call.present}
    if len({*kinds.values()}) > 1:
        yield f"one dtype for all new tokens; got {kinds}"
    if dtype_name(call.k_cache) != dtype_name(call.v_cache):
        yield f"one dtype for both caches; got {_pair(call.k_cache, call.v_cache)}"
    narrows = is_fp8(call.k_cache) and not is_fp8(call.k)
    if not narrows and dtype_name(call.k) != dtype_name(call.k_cache):
        yield f"a cache has the dtype of its tokens, or FP8; got {_pair(call.k_cache, call.k)}"
    if is_fp8(call.k) and call.rotary_cos is not None:
        yield "tokens in FP8 are copied; rotate them before they are stored"
    for name in SCALES:
        x = getattr(call, name)
        if x is None:
            continue
        if not narrows:
            yield f"{name} belongs to a cache in FP8 of tokens in 16 bits"
        of_heads = (call.sequences, call.size("h"))
        if tuple(x.shape) not in ((1,), of_heads) or dtype_name(x) != "float32":
            yield f"{name} needs float32 [1] or {[*of_heads]}; got {named(x)}"


def _pair(one: Described, other: Described) -> str:
    return f"{named(one)}, {named(other)}"


def refusals(call: AppendCall) -> list[str]:
    """Why no kernel serves a call that can be; empty where one does."""
    found = [
        f"{name} needs its last axis contiguous for kernels"
        for name in ("k", "v", "q", *CACHES)
        if (x := getattr(call, name)) is not None and x.stride()[-1] != 1 and x.shape[-1] > 1
    ]
    kinds = {spec_dtype(call.k.dtype), spec_dtype(call.k_cache.dtype)}
    if not kinds <= {*DTYPES_16BIT, *DTYPES_8BIT}:
        found.append(
            f"kernels append 16 and 8 bits; got {dtype_name(call.k)} to {dtype_name(call.k_cache)}"
        )
        return found
    wrong = find_violations(spec_of(call), _FEATURES)
    return [*found, *dict.fromkeys(each.reason for each in wrong)]


def spec_of(call: AppendCall) -> AttentionSpec:
    """The spec of the kernel that serves a call."""
    dtype, kv_dtype = spec_dtype(call.k.dtype), spec_dtype(call.k_cache.dtype)
    d, d_v = call.k.shape[-1], call.v.shape[-1]
    return AttentionSpec(
        head_dim=d,
        head_dim_v=None if d_v == d else d_v,
        dtype=dtype,
        kv_dtype=None if kv_dtype == dtype else kv_dtype,
        directions=("append",),
    )
