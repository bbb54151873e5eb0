"""The operation `attngen::mask_of_function`: what a mask's program shows, as kernels read it, in
code that torch.compile traces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ....call.made_mask import parts_of
from ....fragments.building import Number
from ....fragments.program import Program
from ....fragments.program_text import parse_program
from ..registry import operator
from .bits import Listed, maker_of, planes_of
from .mask import Sizes
from .program import Traced

library = operator(
    "mask_of_function",
    "(Tensor like, Tensor[] captures, Tensor? states, Tensor? shown, str program, str numbers, "
    "SymInt[] sizes, int[] block, bool columns) -> Tensor",
)


def traced_mask(
    traced: Traced,
    sizes: Sizes,
    like: Tensor,
    columns: bool,
    listed: Listed | None = None,
    shown: Tensor | None = None,
) -> Tensor:
    """The mask of a mask_mod in a graph, as `callable_bits.made_by` makes it. like: a tensor on its
    device; shown: booleans beside it."""
    states, block = (listed.states, [listed.queries, listed.keys]) if listed else (None, [])
    found: Tensor = torch.ops.attngen.mask_of_function(
        *(like, list(traced.captures), states, shown),
        traced.program.text,
        " ".join([repr(x) if isinstance(x, float) else str(int(x)) for x in traced.numbers]),
        [sizes.b, sizes.h, sizes.i, sizes.j],
        *(block, columns),
    )
    return found


def mask_of_function(
    like: Tensor,
    captures: Sequence[Tensor],
    states: Tensor | None,
    shown: Tensor | None,
    *rest: Any,
) -> Tensor:
    """A mask, int32 [b or 1, h or 1, words], on the device of `like`.

    captures: as the program reads them; states: of blocks, uint8 [b or 1, h or 1, rows, columns],
    of `block` queries and keys each; shown: bool, a broadcast of [b, h, s_q, s_kv]. rest: the text
    of the program and its run-time numbers; b, h, s_q, s_kv; block; whether gradients read it.
    Raises: SpecError where it is too large; CompileError, LaunchError.
    """
    program, numbers, sizes, block, columns = rest
    own = _program_of(program)
    words = zip(own.numbers, numbers.split(), strict=True)
    given: list[Number] = [float(word) if kind == "f" else int(word) for kind, word in words]
    traced = Traced(own, tuple(captures), tuple(given))
    listed = None
    if states is not None:
        queries, keys = block
        listed = Listed(states, queries, keys)
    where = Sizes(*sizes)
    make = maker_of(traced, where, like.device, columns=columns, listed=listed, shown=shown)
    return make(captures, shown)


@lru_cache(1024)
def _program_of(text: str) -> Program:
    return parse_program(text)


def _fake(
    like: Tensor,
    captures: Sequence[Tensor],
    states: Tensor | None,
    shown: Tensor | None,
    *rest: Any,
) -> Tensor:
    program, _, sizes, _, columns = rest
    where = Sizes(*sizes)
    planes = planes_of(_program_of(program), where, (states, shown))
    words = parts_of(where.i, where.j, columns=columns).words
    return like.new_empty((*planes, words), dtype=torch.int32)


library.impl("mask_of_function", mask_of_function, "CUDA")
torch.library.register_fake("attngen::mask_of_function", _fake, lib=library)


def _mapped(info: Any, in_dims: Any, like: Tensor, captures: Any, *rest: Any) -> tuple[Tensor, int]:
    """A mask for each sample of `torch.vmap`."""
    dim_of_like, dims, *others = in_dims

    def sample(x: Any, dim: Any, place: int) -> Any:
        # Numbers in a list have a list of none.
        return x.select(dim, place) if isinstance(dim, int) else x

    made = []
    for place in range(info.batch_size):
        own = [sample(x, dim, place) for x, dim in zip(captures, dims, strict=True)]
        beside = [sample(x, dim, place) for x, dim in zip(rest, others, strict=True)]
        one = sample(like, dim_of_like, place)
        made.append(torch.ops.attngen.mask_of_function(one, own, *beside))
    return torch.stack(made), 0


torch.library.register_vmap("attngen::mask_of_function", _mapped, lib=library)
