"""Parameters of kernels: their names, types and places, tensor maps, and the launch as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..io.values import to_json
from ..runtime.program import FIELD_BYTES, Field, Grid, KernelEntry, TensorMapRecipe, Workspace
from ..spec.problem import DTYPE_BYTES, Problem
from .base import KernelPlan
from .uses import FragmentUse

BOX_BYTES = 128  # what the swizzle spans of a row
DROP_THRESHOLD = (("drop_low", "i32"), ("drop_high", "i32"))
DROP_LIMIT = (("drop_limit", "i32"),)
Names = list[tuple[str, str]]


def entry_name(problem: Problem, plan: KernelPlan) -> str:
    """The kernel's symbol: family, what it computes, and a digest that tells plans apart."""
    digest = hashlib.sha256((to_json(problem) + to_json(plan)).encode()).hexdigest()[:6]
    return f"{plan.family}__{problem.label}__{digest}"


def describe(
    problem: Problem,
    plan: KernelPlan,
    names: Names,
    *,
    grid: Grid,
    tile_rows: int,
    workspace: tuple[Workspace, ...],
    **facts: Any,
) -> KernelEntry:
    """The launch of the plan's kernel. names: its parameters, in their order; facts: fields of the
    description that not every kernel has, tensor maps and shared memory among them."""
    fields, params_bytes = lay_out_fields(names)
    return KernelEntry(
        entry=entry_name(problem, plan),
        threads=plan.threads,
        tile_rows=tile_rows,
        params_bytes=params_bytes,
        fields=fields,
        grid=grid,
        workspace=workspace,
        **{"smem_bytes": 0, "tensor_maps": (), **facts},
    )


def lay_out_fields(names: Iterable[tuple[str, str]]) -> tuple[tuple[Field, ...], int]:
    """The parameter struct of these names and types, naturally aligned, and its size in bytes."""
    fields, offset, widest = [], 0, 1
    for name, type_ in names:
        size, alignment = FIELD_BYTES[type_]
        offset = _padded(offset, alignment)
        fields.append(Field(name, type_, offset))  # type: ignore[arg-type]  # a key of FIELD_BYTES
        offset, widest = offset + size, max(widest, alignment)
    return tuple(fields), _padded(offset, widest)


def mask_names(name: str, *, asked: bool = False) -> list[tuple[str, str]]:
    """Names and types of the parameters that say where a packed mask lies. asked: whether kernels
    ask its program, so that a pointer to what this reads stands for its bits."""
    if asked and name in ("mask_rows", "mask_columns"):
        return [(name, "ptr")]
    strides = [(f"{name}_stride_{axis}", "i64") for axis in ("batch", "head", "row")]
    return [(name, "ptr"), *strides]


def operands_of(uses: dict[str, list[FragmentUse]]) -> list[tuple[str, str]]:
    """Names and types of the parameters that the fragments read."""
    return [each for group in uses.values() for use in group for each in use.parameters]


def diagonal_names(problem: Problem) -> Names:
    """The parameters that say where the diagonal lies: of positions that of all sequences, unless
    there are places of each."""
    if problem.positions:
        return [("places", "ptr"), ("diagonal", "i32")]
    return typed("i32", "bottom_right")


def joined_names(problem: Problem) -> Names:
    """The parameters that say where an output that joins is rounded, and what of it each sequence
    of several wants."""
    if not problem.continues:
        return []
    return typed("ptr", "rounded", *(("marks",) if problem.varlen else ()))


def joining_names(problem: Problem) -> Names:
    """The parameters that say how an output joins: whether it goes on, whether its sums are kept,
    and, of sequences of one length, rows of the LSE from one head to the next."""
    if not problem.continues:
        return []
    return typed("i32", "goes_on", "keeps_sums", *(() if problem.varlen else ("lse_room",)))


def drop_names(problem: Problem, *own: tuple[str, str]) -> Names:
    """The parameters of dropout, where there is one. own: those of the kernel's own."""
    if not problem.dropout:
        return []
    places = ("query", "key", "head", "sequence") if problem.positions else ()
    return [*own, *typed("i32", *(f"first_{place}" for place in places))]


def operand_names(problem: Problem, *tensors: str) -> Names:
    """The parameters by which a kernel finds operands: tensor maps, or addresses and strides."""
    if not problem.gather:
        return [(f"map_{tensor}", map_type(problem, tensor)) for tensor in tensors]
    names = typed("ptr", *tensors)
    for tensor in tensors:
        names += [*strides_of(tensor), (f"{tensor}_stride_column", "i64")]
    return names


def strides_of(tensor: str) -> Names:
    """The parameters that hold a tensor's strides."""
    return typed("i64", *(f"{tensor}_stride_{axis}" for axis in ("row", "head", "batch")))


def typed(type_: str, *names: str) -> Names:
    """Parameters of one type."""
    return [(name, type_) for name in names]


def map_type(problem: Problem, tensor: str) -> str:
    """The type of the parameter that maps a tensor."""
    if tensor in ("k", "v") and problem.paged:
        return "page_map"
    sequence = problem.kv_seq if tensor in ("k", "v", "dk", "dv") else problem.q_seq
    return "tensor_map" if sequence == "dense" else "sequence_map"


def recipe(tensor: str, dtype: str, rows: int) -> TensorMapRecipe:
    """The map of a tensor, in boxes of `rows` positions and what the swizzle spans."""
    return TensorMapRecipe(f"map_{tensor}", tensor, dtype, BOX_BYTES // DTYPE_BYTES[dtype], rows)


def bias_maps(problem: Problem) -> tuple[TensorMapRecipe, ...]:
    """The map of a bias, where there is one, in boxes of a warp's rows."""
    if not problem.bias:
        return ()
    return (replace(recipe("bias", problem.dtype_bias, 16), spare=True),)


def _padded(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
