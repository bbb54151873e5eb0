"""Render: from a problem and its plan to CUDA source and the description of its launch."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ..fragments.features import Features, Fragment
from ..io.files import open_regular
from ..io.values import to_json
from ..runtime.program import FIELD_BYTES, Field, Grid, KernelEntry, TensorMapRecipe, Workspace
from ..spec.problem import DTYPE_BYTES, Problem
from .base import Plan
from .plan import KernelPlan, template_of

_OPTIONS: dict[str, Any] = {
    "undefined": jinja2.StrictUndefined,
    "block_start_string": "<%",
    "block_end_string": "%>",
    "variable_start_string": "@{",
    "variable_end_string": "}@",
    "comment_start_string": "<#",
    "comment_end_string": "#>",
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "autoescape": False,
}
BOX_BYTES = 128  # what the swizzle spans of a row
DROP_THRESHOLD = (("drop_low", "i32"), ("drop_high", "i32"))

Names = list[tuple[str, str]]


@dataclass(frozen=True)
class Source:
    """CUDA C++ of one kernel, and how to launch what it compiles to."""

    text: str
    kernel: KernelEntry

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Use:
    """A fragment in a kernel: the names of the parameters that fill its struct, in order."""

    fragment: Fragment
    fields: tuple[str, ...]

    @property
    def parameters(self) -> Iterator[tuple[str, str]]:
        """Names and types of the kernel's parameters: of a tensor its address and strides, of one
        that is read in tiles its sizes, too."""
        for name, operand in zip(self.fields, self.fragment.operands, strict=True):
            tile = operand.domain == "tile"
            yield name, "ptr" if operand.axes else operand.dtype
            stride = "i64" if tile else "i32"
            yield from ((f"{name}_stride_{axis}", stride) for axis in operand.axes)
            yield from ((f"{name}_{axis}s", "i32") for axis in operand.axes[2:])

    @property
    def reads_tensors(self) -> bool:
        return any(operand.axes for operand in self.fragment.operands if operand.domain != "tile")

    @property
    def tile(self) -> str | None:
        """The parameter that holds the address of the tensor that is read in tiles."""
        operands = zip(self.fields, self.fragment.operands, strict=True)
        return next((name for name, operand in operands if operand.domain == "tile"), None)

    @property
    def tile_power(self) -> int:
        """The dimension of what is read in tiles, as a power of that of scores."""
        operands = self.fragment.operands
        return next((each.score_power for each in operands if each.domain == "tile"), 0)

    @property
    def score_powers(self) -> tuple[int, ...]:
        return tuple(operand.score_power for operand in self.fragment.operands)

    @property
    def bounds_left(self) -> bool:
        return "left" in self.fragment.bounds

    @property
    def bounds_right(self) -> bool:
        return "right" in self.fragment.bounds


@cache
def environment(root: Path) -> jinja2.Environment:
    """The template environment: delimiters that do not collide with PTX, strict names."""
    return jinja2.Environment(loader=jinja2.FileSystemLoader(root), **_OPTIONS)


def emit_fragment(root: Path, fragment: Fragment) -> str:
    """The struct of one fragment, rendered without any context."""
    module: Any = environment(root).get_template(fragment.template).module
    return str(module.emit()).strip()


def entry_name(problem: Problem, plan: KernelPlan) -> str:
    """The kernel's symbol: family, what it computes, and a digest that tells plans apart."""
    digest = hashlib.sha256((to_json(problem) + to_json(plan)).encode()).hexdigest()[:6]
    return f"{plan.family}__{problem.label}__{digest}"


def render(problem: Problem, plan: Plan, features: Features, root: Path) -> Source:
    """The source of the kernel that computes the forward `problem` as `plan` says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    uses = uses_of(problem, features)
    kernel = describe(
        problem,
        plan,
        _names(problem, plan, uses),
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        tensor_maps=_tensor_maps(problem, plan),
        grid="persistent_tiles",
        workspace=(
            *(("tile_counter",) if plan.schedule.dynamic else ()),
            *(("q_schedule",) if problem.varlen else ()),
            *(("mask_rows",) if problem.attn_mask else ()),
        ),
        kv_group_bytes=plan.schedule.kv_group_bytes,
        group_heads=plan.schedule.group_heads,
        tail_share=plan.schedule.tail_share,
        q_seq=problem.q_seq,
        kv_seq="dense" if problem.paged else problem.kv_seq,  # its maps find pages
        dependent=starts_early(problem, plan),
        orders_few=plan.orders_few,
        no_lse=plan.sums_stored,
        ctas=plan.ctas,
    )
    return Source(fill(problem, plan, kernel, uses, root), kernel)


def is_rendered(path: Path) -> bool:
    """Whether a file was rendered from a template of attngen's."""
    with open_regular(path) as file:
        return b"\n// Rendered by attngen from " in file.read(1000)


def starts_early(problem: Problem, plan: Plan) -> bool:
    """Whether the kernel may start before the one in front has ended, for which it waits itself:
    where that one may tell it lengths, and where the beginning counts, in short calls and under
    windows. With three consumers the compiler makes slower code of it (measured 0.9 % at 64)."""
    window = "window" in problem.masks and plan.pipeline.consumers == 2
    return problem.varlen or plan.ctas > 1 or window or rolls(problem, plan)


def rolls(problem: Problem, plan: Plan) -> bool:
    """Whether a warpgroup visits the blocks that its own rows see, and passes over the tile's
    others, since a block is no larger than what its rows see less than the tile."""
    pipeline = plan.pipeline
    free = pipeline.consumers > 1 and not (pipeline.take_turns or pipeline.q_in_registers)
    return problem.narrow and free and plan.tile.n == 64


def describe(
    problem: Problem,
    plan: KernelPlan,
    names: Names,
    *,
    grid: Grid,
    tile_rows: int,
    workspace: tuple[Workspace, ...],
    tensor_maps: tuple[TensorMapRecipe, ...] = (),
    smem_bytes: int = 0,
    **facts: Any,
) -> KernelEntry:
    """The launch of the plan's kernel. names: its parameters, in their order; facts: fields of the
    description that not every kernel has."""
    fields, params_bytes = lay_out_fields(names)
    return KernelEntry(
        entry=entry_name(problem, plan),
        threads=plan.threads,
        smem_bytes=smem_bytes,
        tile_rows=tile_rows,
        params_bytes=params_bytes,
        fields=fields,
        tensor_maps=tensor_maps,
        grid=grid,
        workspace=workspace,
        **facts,
    )


def fill(
    problem: Problem,
    plan: KernelPlan,
    kernel: KernelEntry,
    uses: dict[str, list[Use]],
    root: Path,
) -> str:
    """The template of the plan's family, filled. Fragments that serve several roles stand once;
    a role that at most one fragment fills is named without a list."""
    template = template_of(plan)
    fragments = {use.fragment.struct: use.fragment for group in uses.values() for use in group}
    lists = {"mask": "masks", "score": "scores"}
    roles = {lists.get(role, role): group if role in lists else group[0]
             for role, group in uses.items()}  # fmt: skip
    return (
        environment(root)
        .get_template(template)
        .render(
            entry=kernel.entry,
            dependent=kernel.dependent,
            rolls=isinstance(plan, Plan) and rolls(problem, plan),
            template=template,
            problem=problem,
            plan=plan,
            fields=kernel.fields,
            params_bytes=kernel.params_bytes,
            mma_element={"bf16": "bf16", "fp16": "f16"}.get(problem.dtype_q),
            fragments=[{"source": emit_fragment(root, each)} for each in fragments.values()],
            bounds_left=any(use.bounds_left for use in uses.get("mask", ())),
            bounds_right=any(use.bounds_right for use in uses.get("mask", ())),
            tile=next((use.tile for use in uses.get("score", ()) if use.tile), None),
            **roles,
        )
    )


def uses_of(problem: Problem, features: Features) -> dict[str, list[Use]]:
    """The fragments of each role; those that serve a role twice prefix their parameters."""

    def use(axis: str, name: str, prefix: str = "") -> Use:
        fragment = features[axis][name]
        return Use(fragment, tuple(prefix + operand.name for operand in fragment.operands))

    return {
        "mask": [use("mask", name) for name in problem.masks],
        "score": [use("score", name) for name in problem.scores],
        "softmax": [use("softmax", problem.softmax)],
        "q_seq": [use("sequence", problem.q_seq, "q_")],
        "kv_seq": [use("sequence", problem.kv_seq, "kv_")],
        "q_fetch": [use("fetch", "gather" if problem.gather else "tma")],
        "kv_fetch": [use("fetch", problem.kv_fetch, "k_")],
        "v_fetch": [use("fetch", problem.kv_fetch, "v_")],
        "kv_iter": [use("iteration", problem.kv_iter)],
    }


def _names(problem: Problem, plan: Plan, uses: dict[str, list[Use]]) -> list[tuple[str, str]]:
    """Names and types of the parameters: tensor maps, pointers and strides, then 4-byte values."""
    names = operand_names(problem, "q", "k", "v")
    # Where rows of no sequence are filled, too.
    addressed = plan.stores_rows or (plan.orders_few and problem.q_seq != "dense")
    # Scores that outgrow float32 are made anew where no maximum was looked for.
    remakes = problem.eight_bit and plan.pipeline.consumers == 3 and problem.masks
    names += [] if plan.stores_rows else [("map_o", map_type(problem, "o"))]
    names += [("o", "ptr")] if addressed else []
    names += typed("ptr", "q", "k") if remakes else []
    names += [("map_bias", "tensor_map")] if problem.bias else []
    names += [("lse", "ptr")]
    names += [("max_logit", "ptr")] if problem.max_logit else []
    if problem.eight_bit:
        pointers = ("descale_q", "descale_k", "descale_v", "scale_s", "descale_s", "scale_o")
        names += [(name, "ptr") for name in (*pointers, "amax_s", "amax_o")]
    if problem.widens:
        names += typed("ptr", "descale_k", "descale_v")
    names += [("rng_state", "ptr")] if problem.dropout else []
    names += mask_names("mask_rows") if problem.attn_mask else []
    names += [("tile_counter", "ptr")] if plan.schedule.dynamic else []
    names += [("q_schedule", "ptr")] if problem.varlen else []
    names += strides_of("o") if addressed else []
    names += [*strides_of("q"), *strides_of("k")] if remakes else []
    names += typed("i32", "dim_qk", "dim_v") if problem.gather else []
    names += [
        ("tiles", "i32"),
        ("tiles_m", "i32"),
        ("heads_q", "i32"),
        ("total_heads", "i32"),
        ("heads_per_group", "i32"),
        ("tail_rows", "i32"),
        ("group_size", "i32"),
        ("bottom_right", "i32"),
        ("scale_log2", "f32"),
    ]
    names += [("sequences", "i32")] if problem.varlen else []
    if problem.eight_bit or problem.widens:
        scaled = "kv" if problem.widens else "qkv"
        for tensor, axis in itertools.product(scaled, ("batch", "head")):
            names += [(f"descale_{tensor}_stride_{axis}", "i32")]
    if problem.dropout:
        names += [("drop_limit", "i32"), ("keep_scale", "f32")]
    return [*names, *operands_of(uses)]


def mask_names(name: str) -> list[tuple[str, str]]:
    """Names and types of the parameters that say where a packed mask lies."""
    strides = [(f"{name}_stride_{axis}", "i64") for axis in ("batch", "head", "row")]
    return [(name, "ptr"), *strides]


def operands_of(uses: dict[str, list[Use]]) -> list[tuple[str, str]]:
    """Names and types of the parameters that the fragments read."""
    return [each for group in uses.values() for use in group for each in use.parameters]


def lay_out_fields(names: Iterable[tuple[str, str]]) -> tuple[tuple[Field, ...], int]:
    """The parameter struct of these names and types, naturally aligned, and its size in bytes."""
    fields, offset, widest = [], 0, 1
    for name, type_ in names:
        size, alignment = FIELD_BYTES[type_]
        offset = _padded(offset, alignment)
        fields.append(Field(name, type_, offset))  # type: ignore[arg-type]  # a key of FIELD_BYTES
        offset, widest = offset + size, max(widest, alignment)
    return tuple(fields), _padded(offset, widest)


def _tensor_maps(problem: Problem, plan: Plan) -> tuple[TensorMapRecipe, ...]:
    """Q, O and a bias move in boxes of a warpgroup's 64 rows, K and V in blocks, or in parts."""
    bias = tuple(replace(x, box_rows=64) for x in bias_maps(problem))
    if problem.gather:
        return bias
    raw_keys = plan.pipeline.raw_keys or plan.tile.n
    rows = {"q": 64, "k": raw_keys if problem.widens else plan.tile.n, "v": raw_keys}
    dtypes = {"q": problem.dtype_q, "k": problem.dtype_kv, "v": problem.dtype_kv}
    if not plan.stores_rows:
        rows["o"], dtypes["o"] = 64, problem.dtype_o
    pages = ("k", "v") if problem.paged else ()
    operands = (
        replace(recipe(x, dtypes[x], rows[x]), l2_bytes=128, paged=x in pages) for x in rows
    )
    return (*operands, *bias)


def bias_maps(problem: Problem) -> tuple[TensorMapRecipe, ...]:
    """The map of a bias, where there is one, in boxes of a warp's rows."""
    if not problem.bias:
        return ()
    return (replace(recipe("bias", problem.dtype_q, 16), spare=True),)


def map_type(problem: Problem, tensor: str) -> str:
    """The type of the parameter that maps a tensor."""
    if tensor in ("k", "v") and problem.paged:
        return "page_map"
    sequence = problem.kv_seq if tensor in ("k", "v", "dk", "dv") else problem.q_seq
    return "tensor_map" if sequence == "dense" else "sequence_map"


def typed(type_: str, *names: str) -> Names:
    """Parameters of one type."""
    return [(name, type_) for name in names]


def strides_of(tensor: str) -> Names:
    """The parameters that hold a tensor's strides."""
    return typed("i64", *(f"{tensor}_stride_{axis}" for axis in ("row", "head", "batch")))


def operand_names(problem: Problem, *tensors: str) -> Names:
    """The parameters by which a kernel finds operands: tensor maps, or addresses and strides."""
    if not problem.gather:
        return [(f"map_{tensor}", map_type(problem, tensor)) for tensor in tensors]
    names = typed("ptr", *tensors)
    for tensor in tensors:
        names += [*strides_of(tensor), (f"{tensor}_stride_column", "i64")]
    return names


def recipe(tensor: str, dtype: str, rows: int) -> TensorMapRecipe:
    """The map of a tensor, in boxes of `rows` positions and what the swizzle spans."""
    return TensorMapRecipe(f"map_{tensor}", tensor, dtype, BOX_BYTES // DTYPE_BYTES[dtype], rows)


def _padded(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
