"""Attention in JAX as benchmarks call it: programs on torch's tensors, whose memory they share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch.utils.dlpack import from_dlpack

from .. import __version__
from ..errors import MeasureError
from .peers import Call, Maker, Operands, Peer, Results
from .workloads import Case

Attend = Callable[..., Any]


def load_jax() -> Any:
    """The package. Raises: MeasureError where it is missing."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too
    try:
        import jax
    except ImportError as error:
        raise MeasureError(f"--frontend jax needs jax: {error}") from error
    return jax


def require_cuda() -> None:
    """Raises: MeasureError where JAX has no GPU."""
    jax = load_jax()
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        raise MeasureError(f"JAX sees no GPU: {error}") from error


def peer_of(source: str, attend: Attend) -> Peer:
    """A function of q, k, v and whether the mask is causal, as a peer."""
    return Peer(source, {"fwd": _forward_of(attend), "bwd": _backward_of(attend)})


def _forward_of(attend: Attend) -> Maker:
    def forward(case: Case, operands: Operands) -> Call:
        jax = load_jax()
        q, k, v, _ = map(jax.numpy.from_dlpack, operands)
        program = jax.jit(partial(attend, causal=case.causal))

        def call() -> Results:
            return (from_dlpack(program(q, k, v)),)

        return call

    return forward


def _backward_of(attend: Attend) -> Maker:
    """The gradients of a forward that is run once and not timed."""

    def backward(case: Case, operands: Operands) -> Call:
        jax = load_jax()
        q, k, v, d_o = map(jax.numpy.from_dlpack, operands)
        _, back = jax.vjp(partial(attend, causal=case.causal), q, k, v)
        program = jax.jit(lambda back, d_o: back(d_o))

        def call() -> Results:
            return tuple([from_dlpack(x) for x in program(back, d_o)])

        return call

    return backward


def ours() -> Peer:
    """attngen itself."""
    jax = load_jax()
    from ..frontends.jax import attention

    def attend(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return attention(q, k, v, mask="causal" if causal else "none", backend="cuda")

    return peer_of(f"attngen {__version__} in jax {jax.__version__}", attend)


def _of_jax(implementation: str) -> Peer:
    """An implementation of `jax.nn.dot_product_attention`."""
    jax = load_jax()

    def attend(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation=implementation
        )

    return peer_of(f"jax {jax.__version__}", attend)


def _tokamax() -> Peer:
    """tokamax, by its kernels for Mosaic, or else Triton; gradients as it makes them."""
    tokamax: Any = import_module("tokamax")

    def attend(q: Any, k: Any, v: Any, causal: bool) -> Any:
        kernels = ("mosaic", "triton")
        return tokamax.dot_product_attention(q, k, v, is_causal=causal, implementation=kernels)

    return peer_of(f"tokamax {version('tokamax')}", attend)


LOADERS: dict[str, Callable[[], Peer]] = {
    "cudnn": partial(_of_jax, "cudnn"),
    "xla": partial(_of_jax, "xla"),
    "tokamax": _tokamax,
}
