"""Peers: public attention kernels, used where they are installed and named where they are not."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import __version__
from ..errors import MeasureError
from ..frontends.pytorch.attention import attention
from .workloads import Case

# A file with the operators `torch.ops.flash_attn_3`, for whoever built them outside any package.
FA3_VARIABLE = "ATTNGEN_FA3_LIBRARY"
_FA3_IN_XFORMERS = ("flash_attn_3/_C*.so", "_C_flashattention3*.so")


class Operands(NamedTuple):
    """bf16 on one CUDA device: q [b, s, h_q, d], k [b, s, h_kv, d], v [b, s, h_kv, d_v], and the
    output's gradient d_o [b, s, h_q, d_v]."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor


Found = TypeVar("Found")
Results = tuple[Tensor, ...]  # the output, as d_o; or the gradients of q, k and v, as these
Call = Callable[[], Results]
Maker = Callable[[Case, Operands], Call]
Through = Literal["operator", "call"]


@dataclass(frozen=True)
class Peer:
    """Who is timed. `source`: the package and version that are called; `makers`: by direction,
    what turns a case and its operands into the call; `deterministic`: the backward that gives the
    same bits on every run, where it can be asked for."""

    source: str
    makers: Mapping[str, Maker]
    deterministic: Maker | None = None


class Absent(Exception):
    """The peer cannot be used on this machine; the message says why."""


def load(names: Sequence[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers of these names that are here, and why the others are not.

    Raises: MeasureError where a name is unknown.
    """
    return load_from(LOADERS, names)


def require_known(loaders: Mapping[str, object], names: Sequence[str]) -> None:
    """Raises: MeasureError where one of the names has no loader."""
    if unknown := [name for name in names if name not in loaders]:
        raise MeasureError(f"unknown peers: {', '.join(unknown)}; there are: {', '.join(loaders)}")


def load_from(
    loaders: Mapping[str, Callable[[], Found]], names: Sequence[str]
) -> tuple[dict[str, Found], dict[str, str]]:
    """Load peers by name. Returns what was found, and why the others are absent.

    Raises: MeasureError where no loader has a name.
    """
    require_known(loaders, names)
    found: dict[str, Found] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            found[name] = loaders[name]()
        except Absent as reason:
            absent[name] = str(reason)
        except Exception as error:  # a package that is broken is as good as absent
            absent[name] = describe(error)
    return found, absent


def describe(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])[:200]


def ours(through: Through = "operator") -> Peer:
    """attngen itself, timed as its peers are. through: what its backward is: the operator's, or
    what autograd does for the public call."""

    def forward(case: Case, operands: Operands, deterministic: bool = False) -> Call:
        arguments: Any = {"mask": "causal" if case.causal else "none", "backend": "cuda"}
        arguments["deterministic"] = deterministic

        def call() -> Results:
            out = attention(*operands[:3], **arguments)
            assert isinstance(out, Tensor)  # no by-product was asked for
            return (out,)

        return call

    def backward(case: Case, operands: Operands, deterministic: bool = False) -> Call:
        q, k, v, d_o = operands
        mask = "causal" if case.causal else "none"
        arguments = {"mask": mask, "deterministic": deterministic}
        out, lse, *_ = torch.ops.attngen.forward(q, k, v, mask=mask)

        def call() -> Results:
            return torch.ops.attngen.backward(  # type: ignore[no-any-return]
                *(d_o, None, q, k, v, out, lse), **arguments
            )

        return call

    if through == "call":
        ordered = differentiated(partial(forward, deterministic=True))
        return Peer(f"attngen {__version__}", _of_both(forward), ordered)
    makers = {"fwd": forward, "bwd": backward}
    return Peer(f"attngen {__version__}", makers, partial(backward, deterministic=True))


def differentiated(forward: Maker) -> Maker:
    """The backward of a differentiable forward, which is run once and not timed."""

    def backward(case: Case, operands: Operands) -> Call:
        q, k, v = (each.detach().requires_grad_() for each in operands[:3])
        with torch.enable_grad():
            (out,) = forward(case, Operands(q, k, v, operands.d_o))()
        return lambda: torch.autograd.grad(out, (q, k, v), operands.d_o, retain_graph=True)

    return backward


def _of_both(forward: Maker) -> dict[str, Maker]:
    return {"fwd": forward, "bwd": differentiated(forward)}


def _load_sdpa() -> Peer:
    """PyTorch's attention, with the backend that it picks itself."""

    def forward(case: Case, operands: Operands) -> Call:
        q, k, v = (each.transpose(1, 2) for each in operands[:3])
        grouped = case.heads_q != case.heads_kv

        def call() -> Results:
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
            return (out.transpose(1, 2),)

        return call

    return Peer(f"torch {torch.__version__}", _of_both(forward))


def _load_efficient() -> Peer:
    """PyTorch's memory-efficient attention, which has any head dim."""
    return _with_backend(f"torch {torch.__version__}", SDPBackend.EFFICIENT_ATTENTION)


def cudnn_source() -> str:
    """The version that PyTorch calls. Raises: Absent."""
    version = torch.backends.cudnn.version()
    if version is None:
        raise Absent("this PyTorch has no cuDNN")
    number = f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
    return f"cuDNN {number} through torch {torch.__version__}"


def _load_cudnn() -> Peer:
    """cuDNN's attention, as PyTorch calls it."""
    return _with_backend(cudnn_source(), SDPBackend.CUDNN_ATTENTION)


def _with_backend(source: str, backend: SDPBackend) -> Peer:
    """PyTorch's attention by one of its backends."""
    sdpa = _load_sdpa()

    def forward(case: Case, operands: Operands) -> Call:
        inner = sdpa.makers["fwd"](case, operands)

        def call() -> Results:
            with sdpa_kernel(backend):
                return inner()

        return call

    return Peer(source, _of_both(forward))


def _load_fa3() -> Peer:
    """FlashAttention-3: its own package, else the operators that xformers or a library brings."""
    library = os.environ.get(FA3_VARIABLE)
    if not library and find_spec("flash_attn_interface"):
        function = import_module("flash_attn_interface").flash_attn_func
        source = f"flash_attn_interface {_version('flash_attn_3', 'flash-attn-3')}"
        return _flash_peer(source, function)
    source, operators = load_fa3_operators()

    def operator(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        return operators.fwd(q, k, v, is_causal=causal, num_splits=1)

    def backward(case: Case, operands: Operands, deterministic: bool = False) -> Call:
        q, k, v, d_o = operands
        out, lse, *_ = operator(q, k, v, case.causal)
        options = {"is_causal": case.causal, "deterministic": deterministic}
        return lambda: operators.bwd(d_o, q, k, v, out, lse, **options)[:3]

    makers = {"fwd": _flash_forward(operator), "bwd": backward}
    return Peer(source, makers, partial(backward, deterministic=True))


def load_fa3_operators() -> tuple[str, Any]:
    """Where FlashAttention-3's operators come from, and they. Raises: Absent."""
    library = os.environ.get(FA3_VARIABLE)
    if library:
        source = f"flash_attn_3 operators of {FA3_VARIABLE}"
    else:
        library = _xformers_library()
        source = f"flash_attn_3 operators of xformers {_version('xformers')}"
    torch.ops.load_library(library)
    operators = torch.ops.flash_attn_3
    if not (hasattr(operators, "fwd") and hasattr(operators, "bwd")):
        raise Absent(f"{library} registers no flash_attn_3::fwd and flash_attn_3::bwd")
    return source, operators


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
    return _flash_peer(source, function)


def _flash_peer(source: str, function: Callable[..., Any]) -> Peer:
    """A function that is like FlashAttention's, and differentiable."""
    ordered = _flash_forward(partial(function, deterministic=True))
    return Peer(source, _of_both(_flash_forward(function)), differentiated(ordered))


def _flash_forward(function: Callable[..., Any]) -> Maker:
    """A call of a function that is like FlashAttention's; some return by-products, too."""

    def forward(case: Case, operands: Operands) -> Call:
        def call() -> Results:
            result = function(*operands[:3], causal=case.causal)
            out = result if isinstance(result, Tensor) else result[0]
            assert isinstance(out, Tensor)
            return (out,)

        return call

    return forward


def _load_flex() -> Peer:
    """FlexAttention under torch.compile, with a block mask where the case is causal."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def forward(case: Case, operands: Operands) -> Call:
        torch.compiler.reset()  # past a number of shapes it would silently stop compiling
        compiled = torch.compile(flex_attention, dynamic=False)
        q, k, v = (each.transpose(1, 2) for each in operands[:3])
        length = case.length
        blocks = (
            create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, q.device.type)
            if case.causal
            else None
        )
        grouped = case.heads_q != case.heads_kv

        def call() -> Results:
            out: Tensor = compiled(q, k, v, block_mask=blocks, enable_gqa=grouped)
            return (out.transpose(1, 2),)

        return call

    return Peer(f"torch {torch.__version__}, compiled", _of_both(forward))


LOADERS: dict[str, Callable[[], Peer]] = {
    "sdpa": _load_sdpa,
    "cudnn": _load_cudnn,
    "fa3": _load_fa3,
    "fa4": _load_fa4,
    "flex": _load_flex,
    "efficient": _load_efficient,
}


def _version(*distributions: str) -> str:
    """The version of the first of these that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
