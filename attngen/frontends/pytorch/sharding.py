"""DTensor operands: each rank attends with its own part of the batch, or of the heads.

An operation on tensors of a device mesh is the same operation on what each rank holds of them.
Along each dimension of the mesh Q, K and V are whole, or parted by sequences, or by heads, and all
else follows: a bias that is broadcast over what is parted stays whole, and its gradient is a sum
over ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...call.fragments import operands_of
from ...call.numbers import Arguments
from ...call.table import CARRIERS, INPUTS, ROW_OF_OPERAND
from ...errors import SpecError
from ...spec.layouts import Layout, axes_of, parse
from .signature import Operands, split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

Outputs = tuple[Tensor, ...]
Parted = Literal["whole", "batch", "heads"]
_AXIS = {"batch": "b", "heads": "h"}
_WHOLE = -1  # the axis of what is not parted


def is_distributed(operands: Operands) -> bool:
    """Whether one of them is a DTensor."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    return any([x is not None and hasattr(x, "device_mesh") for x in operands])


def refuse_functions(names: Sequence[str]) -> None:
    """Raises: SpecError where compiled code calls with DTensors and functions, which see a rank's
    own heads and sequences by their place among these alone. names: of the arguments that are
    some."""
    if names:
        raise SpecError(
            f"{', '.join(names)}: functions of heads and sequences do not know which a rank has in "
            "code that torch.compile traces; pass attn_mask or bias, or leave attention out of it"
        )


def over_shards(attend: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """The operation for operands of which some are DTensors."""

    def attend_sharded(*inputs: Any) -> Outputs:
        operands, rest = inputs[: len(INPUTS)], inputs[3:]
        _, arguments = split(rest)
        call = Sharded.of(dict(zip(INPUTS, operands, strict=True)), arguments)
        local = [call.part_of(name, x) for name, x in zip(INPUTS, operands, strict=True)]
        outputs = attend(*local, *inputs[len(INPUTS) :])
        return call.joined(outputs, operands)

    return attend_sharded


@dataclass(frozen=True)
class Sharded:
    """How a call is parted: along each dimension of the mesh. slots: axes of the operands of its
    fragments."""

    mesh: DeviceMesh
    parted: tuple[Parted, ...]
    layout: Layout
    slots: Mapping[str, tuple[tuple[str, ...], ...]]

    @classmethod
    def of(cls, operands: Mapping[str, Tensor | None], arguments: Arguments) -> Sharded:
        """Shards of a call's operands. Raises: SpecError where they do not belong together."""
        layout = parse(arguments.layout)
        carriers = {name: x for name in CARRIERS if (x := operands[name]) is not None}
        mesh = next(x.device_mesh for x in operands.values() if hasattr(x, "device_mesh"))  # type: ignore[union-attr]
        reasons = [
            f"{name} is a tensor of this rank beside DTensors; pass distribute_tensor({name}, mesh)"
            for name, x in carriers.items()
            if not hasattr(x, "device_mesh")
        ]
        reasons += [
            f"{name} lies on another device mesh than others; redistribute it"
            for name, x in operands.items()
            if getattr(x, "device_mesh", mesh) != mesh
        ]
        if reasons:
            raise SpecError(reasons)
        dims = range(mesh.ndim)
        found = [_parted_along(dim, carriers, layout, reasons) for dim in dims]
        own = operands_of(arguments.mask, arguments.score_mod)
        call = cls(mesh, tuple(found), layout, {each.slot: each.shapes for each in own})
        reasons += call._violations(operands, arguments)
        if reasons:
            raise SpecError(reasons)
        return call

    def _ranks(self, kind: Parted) -> int:
        sizes = [self.mesh.size(dim) for dim, parted in enumerate(self.parted) if parted == kind]
        ranks = 1
        for size in sizes:
            ranks *= size
        return ranks

    def _violations(self, operands: Mapping[str, Tensor | None], arguments: Arguments) -> list[str]:
        reasons, ranks = [], self._ranks("heads")
        for name in CARRIERS:
            x, axis = operands[name], self._axis_of(name, operands[name], "heads")
            if ranks > 1 and x is not None and x.shape[axis] % ranks:
                reasons.append(
                    f"{name} has {x.shape[axis]} heads for {ranks} ranks: these must divide the "
                    "heads of q and of k and v alike; replicate them, or repeat those of k and v"
                )
        batch = self._ranks("batch") > 1
        if batch and "thd" in self.layout.formats:
            reasons.append(
                f"layout={arguments.layout!r} has packed tokens, whose sequences do not end where "
                "those of a rank do: shard the heads, or call with to_local() of each rank's own"
            )
        names = [name for name in ("cu_seqlens_q", "cu_seqlens_kv") if operands[name] is not None]
        if batch and names and "thd" not in self.layout.formats:
            reasons.append(f"{', '.join(names)}: of a sharded batch pass seqused_q and seqused_kv")
        if arguments.dropout_p > 0 and not hasattr(operands["rng_state"], "device_mesh"):
            reasons.append(
                "dropout_p: each rank would draw a state of its own; pass rng_state="
                "distribute_tensor(torch.randint(2**62, (2,)), mesh, [Replicate()])"
            )
        if arguments.dropout_p > 0 and (batch or ranks > 1):
            reasons.append(
                "dropout_p: what is dropped depends on the numbers of sequences and heads, which a "
                "rank counts from its own first; replicate q, k and v, or leave it out"
            )
        return reasons

    def _axis_of(self, name: str, tensor: Tensor | None, kind: Parted) -> int:
        """The axis of an operand that is parted, _WHOLE where none is."""
        if tensor is None or kind == "whole":
            return _WHOLE
        if name in CARRIERS:
            carried = axes_of(self.layout, name)
            return carried.index(_AXIS[kind]) if _AXIS[kind] in carried else _WHOLE
        row = ROW_OF_OPERAND[name]
        shapes = self.slots.get(name, row.shapes)
        if row.is_broadcast:
            axis = tensor.ndim - (4 if kind == "batch" else 3)
            return axis if axis >= 0 and tensor.shape[axis] > 1 else _WHOLE
        wanted = ("b",) if kind == "batch" else ("h_q", "h_kv")
        axes = next((shape for shape in shapes if len(shape) == tensor.ndim), ())
        return next((place for place, axis in enumerate(axes) if axis in wanted), _WHOLE)

    def part_of(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """This rank's part of an operand; a gradient of it is that of all ranks."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if tensor is None:
            return None
        axes = [self._axis_of(name, tensor, kind) for kind in self.parted]
        placed = [Replicate() if axis == _WHOLE else Shard(axis) for axis in axes]
        of_gradient = [
            Partial() if axis == _WHOLE and kind != "whole" else place
            for axis, kind, place in zip(axes, self.parted, placed, strict=True)
        ]
        if not isinstance(tensor, DTensor):  # the same on each rank, as slopes are
            whole = [Replicate()] * self.mesh.ndim
            tensor = DTensor.from_local(tensor, self.mesh, whole, run_check=False)
        return tensor.redistribute(self.mesh, placed).to_local(grad_placements=of_gradient)

    def whole(self, tensor: Any) -> Tensor:
        """A DTensor that each rank reads all of; a gradient of it is that of all ranks."""
        from torch.distributed.tensor import Partial, Replicate

        placed = [Replicate()] * self.mesh.ndim
        of_gradient = [Replicate() if kind == "whole" else Partial() for kind in self.parted]
        found: Tensor = tensor.redistribute(self.mesh, placed).to_local(grad_placements=of_gradient)
        return found

    def rows_of(self, kind: Parted, size: int) -> slice:
        """This rank's rows of so many along what is parted so, as `torch.chunk` cuts them."""
        start, end = 0, size
        for dim, rank in enumerate(self.mesh.get_coordinate() or ()):
            if self.parted[dim] == kind:
                step = -(-(end - start) // self.mesh.size(dim))
                start, end = min(end, start + rank * step), min(end, start + (rank + 1) * step)
        return slice(start, end)

    def starts_of(self, q: Tensor) -> tuple[int | None, int | None]:
        """Numbers of this rank's first sequence and head, None of what is not parted."""
        sizes = dict(zip(axes_of(self.layout, "q"), q.shape, strict=True))
        batch, heads = "batch" in self.parted, "heads" in self.parted
        return (
            self.rows_of("batch", sizes["b"]).start if batch else None,
            self.rows_of("heads", sizes["h"]).start if heads else None,
        )

    def joined(self, outputs: Outputs, operands: Sequence[Any]) -> Outputs:
        """The outputs of all ranks, from this one's."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        q = dict(zip(INPUTS, operands, strict=True))["q"]
        axes = axes_of(self.layout, "q")
        rows = "ht" if self.layout.q_format == "thd" else "bhs"
        # Of the output, the LSE, the maxima of S and O, and the largest score of each head.
        of_outputs = (self.layout.q_format, rows, "", "", "h")
        sizes = {axis: q.shape[axes.index(axis)] for axis in self.layout.q_format}
        joined = []
        for axes_of_output, local in zip(of_outputs, outputs, strict=True):
            placed: list[Placement] = []
            for kind in self.parted:
                axis = axes_of_output.find(_AXIS.get(kind, "-"))
                maximum = Replicate() if kind == "whole" else Partial("max")
                placed.append(maximum if axis == _WHOLE else Shard(axis))
            shape = [sizes[axis] for axis in axes_of_output] or [*local.shape]
            if axes_of_output == self.layout.q_format:
                shape[-1] = local.shape[-1]
            if not local.numel() and axes_of_output in ("", "h") and 0 not in shape:
                joined.append(local)  # nobody has asked for it
                continue
            strides = torch.empty(shape, device="meta").stride()
            made = DTensor.from_local(
                local, self.mesh, placed, run_check=False, shape=torch.Size(shape), stride=strides
            )
            joined.append(made)
        return tuple(joined)


def _parted_along(
    dim: int, carriers: Mapping[str, Any], layout: Layout, reasons: list[str]
) -> Parted:
    """How q, k and v are parted along a dimension of their mesh; adds to `reasons` why they cannot
    be. What is whole, or a sum that is due, becomes what others are."""
    kinds: dict[str, Parted] = {}
    for name, x in carriers.items():
        placement = x.placements[dim]
        if not placement.is_shard():
            continue
        axes = axes_of(layout, name)
        axis = axes[placement.dim]
        if axis in ("b", "h"):
            kinds[name] = "batch" if axis == "b" else "heads"
        elif axis == "t":
            reasons.append(
                f"{name} is sharded over packed tokens, whose sequences do not end where those of "
                "a rank do: shard the heads, or call with to_local() of each rank's own sequences"
            )
        else:
            reasons.append(
                f"{name} is sharded along {axis!r} of [{', '.join(axes)}]; whole, or sharded over "
                "b or h, each rank attends by itself. Redistribute it."
            )
    if len({*kinds.values()}) > 1:
        said = ", ".join(f"{name} over {kind}" for name, kind in kinds.items())
        reasons.append(f"operands are sharded differently: {said}; redistribute one")
    return next(iter(kinds.values()), "whole")
