"""Peers: public attention kernels, used where they are installed and named where they are not."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import __version__
from ..errors import MeasureError
from ..ops.frontend import attention
from .workloads import Case

# A file with the operators `torch.ops.flash_attn_3`, for whoever built them outside any package.
FA3_VARIABLE = "ATTNGEN_FA3_LIBRARY"
_FA3_IN_XFORMERS = ("flash_attn_3/_C*.so", "_C_flashattention3*.so")


class Operands(NamedTuple):
    """bf16 on one CUDA device: q [b, s, h_q, d], k [b, s, h_kv, d], v [b, s, h_kv, d_v]."""

    q: Tensor
    k: Tensor
    v: Tensor


Call = Callable[[], Tensor]  # the output, [b, s, h_q, d_v]
Maker = Callable[[Case, Operands], Call]


@dataclass(frozen=True)
class Peer:
    """Who is timed. `source`: the package and version that are called; `makers`: by direction,
    what turns a case and its operands into the call."""

    source: str
    makers: Mapping[str, Maker]


class Absent(Exception):
    """The peer cannot be used on this machine; the message says why."""


def load(names: Sequence[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers of these names that are here, and why the others are not.

    Raises: MeasureError where a name is unknown.
    """
    if unknown := [name for name in names if name not in LOADERS]:
        raise MeasureError(f"unknown peers: {', '.join(unknown)}; there are: {', '.join(LOADERS)}")
    found: dict[str, Peer] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            found[name] = LOADERS[name]()
        except Absent as reason:
            absent[name] = str(reason)
        except Exception as error:  # a package that is broken is as good as absent
            absent[name] = describe(error)
    return found, absent


def describe(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])[:200]


def ours() -> Peer:
    """attngen itself, timed as its peers are."""

    def forward(case: Case, operands: Operands) -> Call:
        mask = "causal" if case.causal else "none"

        def call() -> Tensor:
            out = attention(*operands, mask=mask, backend="cuda")
            assert isinstance(out, Tensor)  # no by-product was asked for
            return out

        return call

    return Peer(f"attngen {__version__}", {"fwd": forward})


def _load_sdpa() -> Peer:
    """PyTorch's attention, with the backend that it picks itself."""

    def forward(case: Case, operands: Operands) -> Call:
        q, k, v = (each.transpose(1, 2) for each in operands)
        grouped = case.heads_q != case.heads_kv

        def call() -> Tensor:
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
            return out.transpose(1, 2)

        return call

    return Peer(f"torch {torch.__version__}", {"fwd": forward})


def _load_cudnn() -> Peer:
    """cuDNN's attention, as PyTorch calls it."""
    version = torch.backends.cudnn.version()
    if version is None:
        raise Absent("this PyTorch has no cuDNN")
    sdpa = _load_sdpa()

    def forward(case: Case, operands: Operands) -> Call:
        inner = sdpa.makers["fwd"](case, operands)

        def call() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return inner()

        return call

    number = f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
    return Peer(f"cuDNN {number} through {sdpa.source}", {"fwd": forward})


def _load_fa3() -> Peer:
    """FlashAttention-3: its own package, else the operators that xformers or a library brings."""
    library = os.environ.get(FA3_VARIABLE)
    if not library and find_spec("flash_attn_interface"):
        function = import_module("flash_attn_interface").flash_attn_func
        source = f"flash_attn_interface {_version('flash_attn_3', 'flash-attn-3')}"
        return Peer(source, {"fwd": _flash_forward(function)})
    if library:
        source = f"flash_attn_3 operators of {FA3_VARIABLE}"
    else:
        library = _xformers_library()
        source = f"flash_attn_3 operators of xformers {_version('xformers')}"
    torch.ops.load_library(library)
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        raise Absent(f"{library} registers no flash_attn_3::fwd")

    def operator(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        return torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal, num_splits=1)

    return Peer(source, {"fwd": _flash_forward(operator)})


def _xformers_library() -> str:
    """xformers' library of FlashAttention-3; the package is not imported, since the rest of it
    may not fit this PyTorch."""
    spec = find_spec("xformers")
    for folder in (spec and spec.submodule_search_locations) or ():
        for pattern in _FA3_IN_XFORMERS:
            for path in sorted(Path(folder).glob(pattern)):
                return str(path)
    where = "xformers lacks it" if spec else "neither flash_attn_interface nor xformers is here"
    raise Absent(f"{where}; {FA3_VARIABLE} may name a library with the flash_attn_3 operators")


def _load_fa4() -> Peer:
    """FlashAttention-4, in Python."""
    function = import_module("flash_attn.cute").flash_attn_func
    source = f"flash_attn.cute {_version('flash-attn-4', 'flash_attn')}"
    return Peer(source, {"fwd": _flash_forward(function)})


def _flash_forward(function: Callable[..., Any]) -> Maker:
    """A call of a function that is like FlashAttention's; some return by-products, too."""

    def forward(case: Case, operands: Operands) -> Call:
        def call() -> Tensor:
            result = function(*operands, causal=case.causal)
            out = result if isinstance(result, Tensor) else result[0]
            assert isinstance(out, Tensor)
            return out

        return call

    return forward


def _load_flex() -> Peer:
    """FlexAttention under torch.compile, with a block mask where the case is causal."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def forward(case: Case, operands: Operands) -> Call:
        torch.compiler.reset()  # past a number of shapes it would silently stop compiling
        compiled = torch.compile(flex_attention, dynamic=False)
        q, k, v = (each.transpose(1, 2) for each in operands)
        length = case.length
        blocks = (
            create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, q.device.type)
            if case.causal
            else None
        )
        grouped = case.heads_q != case.heads_kv

        def call() -> Tensor:
            out: Tensor = compiled(q, k, v, block_mask=blocks, enable_gqa=grouped)
            return out.transpose(1, 2)

        return call

    return Peer(f"torch {torch.__version__}, compiled", {"fwd": forward})


LOADERS: dict[str, Callable[[], Peer]] = {
    "sdpa": _load_sdpa,
    "cudnn": _load_cudnn,
    "fa3": _load_fa3,
    "fa4": _load_fa4,
    "flex": _load_flex,
}


def _version(*distributions: str) -> str:
    """The version of the first of these that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
