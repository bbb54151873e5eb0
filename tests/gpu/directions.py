"""Both directions of a call on kernels and by the reference, in memory full of NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen import reference

from . import oracle


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=oracle.DEVICE)


def loosen(x: Tensor, how: str) -> Tensor:
    """The tensor in a buffer of NaN: from its `start1`, `start2` … on, by so many elements; with
    rows of so many more columns, `rows1` …; with its columns `apart`; as it is where `how` is
    empty."""
    *outer, d = x.shape
    if not how:
        return x
    if how == "apart":
        view = x.new_full((*outer, 2 * d), math.nan)[..., ::2]
    elif how.startswith("rows"):
        view = x.new_full((*outer, d + int(how[4:])), math.nan)[..., :d]
    else:
        shift = int(how.removeprefix("start"))
        view = x.new_full((x.numel() + shift,), math.nan)[shift:].view(x.shape)
    return view.copy_(x)


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
    operands: Sequence[Tensor | None],
    d_o: Tensor,
    dlse: Tensor,
    device: torch.device | None = None,
    loose: str = "",
    **arguments: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, LSE and the gradients of the operands that are there, by the kernels of a device,
    that of the operands if none is named, where they lie as `loosen` says."""
    home, device = d_o.device, device or d_o.device
    given = [
        None if x is None else loosen(x.detach().to(device), loose).requires_grad_()
        for x in operands
    ]
    arguments = {"deterministic": False, **arguments}
    arguments = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    present = with_leaves(given, arguments)
    with poisoned_memory():
        out, aux = attngen.attention(*given, **arguments, backend="cuda", return_lse=True)
        incoming = [loosen(d_o.to(device), loose), dlse.to(device)]
        found = torch.autograd.grad([out, aux.lse], present, incoming)
    return out.detach().to(home), aux.lse.detach().to(home), [x.to(home) for x in found]


def with_leaves(given: Sequence[Tensor | None], arguments: dict[str, Any]) -> list[Tensor]:
    """List the tensors that get gradients; sink and bias become leaves of their own."""
    present = [x for x in given if x is not None]
    for name in ("sink", "bias"):
        if name in arguments:
            arguments[name] = arguments[name].detach().clone().requires_grad_()
            present.append(arguments[name])
    return present


def expected(
    operands: Sequence[Tensor | None],
    d_o: Tensor,
    dlse: Tensor,
    dtype: torch.dtype,
    **arguments: Any,
) -> list[Tensor]:
    """The gradients by the reference on tensors of that dtype."""
    given = [None if x is None else x.detach().to(dtype).requires_grad_() for x in operands]
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"].to(dtype)
    present = with_leaves(given, arguments)
    out, aux = reference.attention(*given, **arguments)
    return list(
        torch.autograd.grad([out, aux.lse], present, [d_o.to(dtype), dlse.to(aux.lse.dtype)])
    )
