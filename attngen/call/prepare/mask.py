"""Masks that are prepared: the launch that makes one of a callable's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...fragments.header import PREFIX
from ...fragments.names import CAPTURED, NUMBER
from ...fragments.program import Program
from ...kernels.family import Choice
from ...runtime.launch import prepare
from ...runtime.parameters import AXES
from ...runtime.run_time import Extent, Scalars
from ...spec.mask_checks import spec_of_mask
from .. import kernel_choice, made_mask
from ..kernel_choice import Device
from ..prepared import Launches
from ..tensors import Described, TensorDesc

OPERAND = "attn_mask"
_NOTHING = Extent(1, 1, 1, 1, 0, 0, 0)  # of q, k and v, of which the kernel reads none


@dataclass(frozen=True)
class ListedBlocks:
    """Blocks as lists have them: their states, uint8 [b or 1, h or 1, rows, columns], contiguous, 0
    where nothing of a block takes part, 1 where the mask says what, 2 where all of it does; and how
    many queries and keys each has."""

    states: TensorDesc
    queries: int
    keys: int


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedMask(Launches):
    """The making of a mask, for all that differ from it in addresses alone. operands: parameters of
    the mask and of captured tensors, in their order."""

    operands: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        self._point(self.operands)


def prepare_mask(
    program: Program,
    numbers: Sequence[int | float],
    captures: Sequence[Described],
    made: TensorDesc,
    sizes: tuple[int, int],
    device: Device,
    blocks: ListedBlocks | None = None,
    shown: Described | None = None,
) -> PreparedMask:
    """The launch that makes a mask.

    numbers, captures: what the program reads; made: the mask, of `made_mask.parts_of` these
    sizes, queries and keys, or `made_mask.asked_parts_of` them; blocks: what lists say of blocks,
    if there are any; shown: bool, a broadcast of [b, h, queries, keys], what else says which pairs
    take part. Raises: SpecError, CompileError, LaunchError.
    """
    (kernel,) = kernel_choice.kernels_of(spec_of_mask(program.name), device, Choice())
    given: dict[str, int | float] = {**made_mask.numbers_of(made, *sizes)}
    given |= {**_numbers_of(blocks), **_strides_of(shown)}
    given |= {f"{PREFIX}{NUMBER}{place}": number for place, number in enumerate(numbers)}
    for place, tensor in enumerate(captures):
        name = f"{PREFIX}{CAPTURED}{place}"
        steps = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        for axis, (size, stride) in steps:
            given[f"{name}_size_{axis}"] = size
            given[f"{name}_stride_{axis}"] = stride if size > 1 else 0
    scalars = Scalars(1.0, numbers=given, sequences=1)
    launched = prepare(kernel, dict.fromkeys("qkv", _NOTHING), scalars)
    sources = made_mask.sources_of(made, *sizes)
    if made_mask.is_asked(made):  # which has no bits to write
        sources = tuple(
            (field, tensor, start)
            for field, tensor, start in sources
            if field not in made_mask.BITS
        )
    names = (OPERAND, *(f"{PREFIX}{CAPTURED}{place}" for place in range(len(captures))))
    names += ("mask_blocks",) if blocks else ()
    names += ("mask_shown",) if shown is not None else ()
    absent = {name for _, name in launched.pointers} - {*names, *(name for name, _, _ in sources)}
    return PreparedMask(
        device=device,
        operands=names,
        sources=sources,
        launches=(launched,),
        fixed=dict.fromkeys(sorted(absent), 0),
    )


def _numbers_of(blocks: ListedBlocks | None) -> dict[str, int]:
    """Numbers of the kernel that only lists of blocks have; of none they are 0."""
    batches, heads, rows, columns = blocks.states.shape if blocks else (1, 1, 0, 0)
    return {
        "mask_blocks_stride_batch": heads * rows * columns if batches > 1 else 0,
        "mask_blocks_stride_head": rows * columns if heads > 1 else 0,
        "mask_blocks_stride_row": columns,
        "mask_block_queries": blocks.queries if blocks else 1,
        "mask_block_keys": blocks.keys if blocks else 1,
        "mask_blocks_rows": rows,
        "mask_blocks_columns": columns,
    }


def _strides_of(shown: Described | None) -> dict[str, int]:
    """The strides of booleans, 0 where they are broadcast; of none all are 0."""
    sizes, strides = ((), ()) if shown is None else (tuple(shown.shape), shown.stride())
    missing = (0,) * (len(AXES) - len(sizes))
    steps = [step if size > 1 else 0 for size, step in zip(sizes, strides, strict=True)]
    return {f"mask_shown_stride_{x}": n for x, n in zip(AXES, (*missing, *steps), strict=True)}
