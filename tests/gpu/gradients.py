"""The float64 rule for gradients, and the backward's kernels run on given tensors.

With G64 the gradient in float64 of the same 16-bit inputs, and e_torch the largest error against it
of the reference's gradient (float32 arithmetic, D of an output in 16 bits, rounded to 16 bits at
its end):
    max |G - G64|  <=  4 e_torch + eps/2 max |G64|,    eps the spacing of the dtype's numbers at 1.
Beside these a kernel rounds two things to 16 bits: the weights and the gradients of the scores.
Each errs about as much as rounding the gradient does: hence the 4. All the roundings, written down
in PyTorch on a CPU, come to at most 3.8 times the error of rounding the gradient alone, over head
dims from 8 to 256, masks, lengths and dtypes; where a query sees one key, what D loses is all there
is. The last term is one rounding of the largest element, for calls so small that the reference's
largest error is a lucky one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngen import AttentionSpec, reference
from attngen.call import kept_ds
from attngen.call.operands import extent
from attngen.compiler import builder
from attngen.fragments import features
from attngen.kernels.selection import made_by
from attngen.runtime import launch, load, run_time
from attngen.runtime.launch import Prepared
from attngen.runtime.load import LoadedKernel
from attngen.runtime.run_time import UNBOUNDED, Scalars
from attngen.spec import layouts, resolve
from attngen.spec.problem import Problem

from ..emulator.device import ARCH
from . import oracle

NAMES = ("dq", "dk", "dv")
GARBAGE = 255  # in every byte: NaN as a float, -1 as an integer


def without_rivals(kernels: tuple[LoadedKernel, ...]) -> tuple[LoadedKernel, ...]:
    """The kernels without that which makes dQ of scores, where one makes it of dS in memory."""
    if not any(map(kept_ds.reads_ds, kernels)):
        return kernels
    return tuple(x for x in kernels if kept_ds.reads_ds(x) or "dq" not in made_by(x.kernel))


class Backward:
    """The kernels of a problem, prepared for tensors of these shapes and strides.

    tensors: q, k, v, o, d_o and dq, dk, dv in the axis order `axes`; none is empty.
    """

    def __init__(
        self,
        problem: Problem,
        tensors: dict[str, Tensor],
        axes: str = "bshd",
        window: tuple[int, int] = (-1, -1),
        bottom_right: bool = False,
    ) -> None:
        device = torch.cuda.current_device()
        self.tensors = tensors
        extents = {name: extent(tensor, axes) for name, tensor in tensors.items()}
        left, right = (side if side >= 0 else UNBOUNDED for side in window)
        found = (
            load.load(binary, cubin, device)
            for binary, cubin in builder.find_kernels(problem, ARCH)
        )
        kernels = without_rivals(tuple(found))
        kept = kept_ds.kept_by(kernels, extents)
        scale = problem.head_dim_qk**-0.5
        scalars = Scalars(scale, left, right, bottom_right, numbers=dict(kept.numbers))
        self.prepared: list[Prepared] = []
        sizes: dict[str, int] = {}
        for each, numbers in kept_ds.in_rounds(kernels, kept):
            told = dataclasses.replace(scalars, numbers={**kept.numbers, **numbers})
            self.prepared.append(launch.prepare(each, extents, told))
            sizes |= run_time.workspace_bytes(each.kernel, extents["q"], numbers=kept.numbers)
        self.workspaces = {
            name: torch.full((size,), GARBAGE, dtype=torch.uint8, device=oracle.DEVICE)
            for name, size in sizes.items()
        }
        # Kernels that take tiles by turns count them.
        self.counters = [x for name, x in self.workspaces.items() if name == "tile_counter"]
        for each in self.counters:
            each.zero_()

    def __call__(self, lse: Tensor, dlse: Tensor | None) -> None:
        """Fills dq, dk and dv. lse, dlse: float32 [b, h_q, s_q], contiguous."""
        assert lse.is_contiguous() and (dlse is None or dlse.is_contiguous())
        held = {**self.tensors, **self.workspaces, "lse": lse}
        addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
        addresses["dlse"] = 0 if dlse is None else dlse.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        for prepared in self.prepared:
            launch.launch(prepared, addresses, stream)
        torch.cuda.synchronize()
        assert not any(x.any() for x in self.counters), "the counter must be left at zero"


def reference_gradients(
    tensors: Sequence[Tensor], dlse: Tensor | None, dtype: torch.dtype, **arguments: Any
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, LSE and the gradients of q, k and v, by the reference on tensors of that dtype.

    tensors: q, k, v, d_o; dlse: gradient of the LSE, or None.
    """
    *operands, d_o = (tensor.detach().to(dtype) for tensor in tensors)
    operands = [tensor.requires_grad_() for tensor in operands]
    out, aux = reference.attention(*operands, **arguments)
    assert aux.lse is not None
    results, incoming = [out], [d_o]
    if dlse is not None:
        results.append(aux.lse)
        incoming.append(dlse.to(aux.lse.dtype))
    found = torch.autograd.grad(results, operands, incoming)
    return out.detach(), aux.lse.detach().float().contiguous(), found


def check(
    found: Sequence[Tensor | None], tensors: Sequence[Tensor], dlse: Tensor | None, **arguments: Any
) -> None:
    """Asserts the rule for dq, dk and dv, or those that there are."""
    dtype, d_o = tensors[0].dtype, tensors[-1].double()
    out, lse, expected = reference_gradients(tensors, dlse, torch.float64, **arguments)
    # D = rowsum(d_o * out) - dlse: what rounding adds to the one is taken from the other.
    axes = oracle.TO_BHSD[layouts.parse(arguments.get("layout", "bshd")).q_format][:-1]
    added = ((out.to(dtype) - out) * d_o).sum(-1).permute(axes)
    shifted = (0 if dlse is None else dlse) - added
    *_, rounded = reference_gradients(tensors, shifted, dtype, **arguments)
    check_against(found, expected, rounded)


def check_against(
    found: Sequence[Tensor | None], expected: Sequence[Tensor], rounded: Sequence[Tensor]
) -> None:
    """Asserts the rule, given the reference's gradients in float64 and in the call's dtype."""
    for name, gradient, truth, torch_s in zip(NAMES, found, expected, rounded, strict=True):
        if gradient is None:
            continue
        dtype = gradient.dtype
        assert gradient.shape == truth.shape and dtype == torch_s.dtype
        assert not gradient.isnan().any(), f"{name}: {int(gradient.isnan().sum())} NaN"
        error = oracle.largest((gradient.double() - truth).abs())
        torch_error = oracle.largest((torch_s.double() - truth).abs())
        largest = oracle.largest(truth.abs())
        limit = 4 * torch_error + torch.finfo(dtype).eps / 2 * largest
        assert error <= limit, f"{name}: error {error:.3e} > {limit:.3e}, of {largest:.3e}"


class Surrounded:
    """Copies of tensors inside buffers of NaN, which reach beyond every end of every axis."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.buffers, self.views = {}, {}
        for name, tensor in tensors.items():
            shape = (*(n + 2 for n in tensor.shape[:3]), tensor.shape[3] + 16)
            self.buffers[name] = tensor.new_full(shape, math.nan)
            self.views[name] = self.buffers[name][1:-1, 1:-1, 1:-1, 8:-8]
            self.views[name].copy_(tensor)

    def assert_untouched(self) -> None:
        """Nothing outside the views was written."""
        for name, buffer in self.buffers.items():
            outside = torch.ones_like(buffer, dtype=torch.bool)
            outside[1:-1, 1:-1, 1:-1, 8:-8] = False
            assert buffer[outside].isnan().all(), f"{name}: written beyond its end"


def backwards_of(spec: AttentionSpec) -> list[Problem]:
    """The problems of a forward's gradients: in any order, and in one that does not change."""
    specs = [
        dataclasses.replace(spec, directions=("bwd",), deterministic=order)
        for order in (False, True)
    ]
    return [problem for each in specs for problem in resolve.resolve(each, features.scan())]
