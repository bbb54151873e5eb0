"""Backwards of rows that meet their keys in parts: what is of the rows alone is made once.

D and the LSE of all rows are prepared before the first part, and float32 sums of dQ, which each
part's kernel adds to in a workspace that outlives it, become dQ behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import CacheError
from ...kernels.selection import made_by, maker_of, read_by
from ...runtime.launch import prepare
from ...runtime.load import LoadedKernel
from ...runtime.run_time import workspace_bytes
from .. import fragment_values
from ..kernel_choice import Device
from ..numbers import Arguments
from ..operands import extents_of, sources_of, unpacked
from ..prepared import Launches, lay_out_workspaces
from ..table import WantedGradients
from ..tensors import TensorDesc
from .backward import Backward, Tensors, choose, present, read

KEPT = ("lse_log2", "d", "turns", "dq_acc")  # workspaces of rows; `turns` where kernels count
OF_KEYS = ("dk", "dv", "dkv_acc")  # which a kernel rounds that is told of some
OF_ROWS = ("o", "d_o", "lse", "dlse")
_WANTED = WantedGradients(*[name in ("dq", "dkv") for name in WantedGradients._fields])


@dataclass(frozen=True)
class AllRows:
    """All rows of queries of a backward, of which a part has some.

    first: of the part's rows. tensors: q, o and d_o of all of them, and dk and dv, float32, which
    the part's gradients of keys and values are written to.
    """

    first: int
    tensors: Mapping[str, TensorDesc]


@dataclass(frozen=True, eq=False, kw_only=True)
class NamedLaunches(Launches):
    """Launches beside the names of the addresses that they are given, in their order."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        self._point(self.names)


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedPart:
    """A part, and what is of all rows.

    before: makes D and the LSE of all rows; part: gradients of its keys, and sums of dQ; after:
    turns these into float32 dQ of all rows, find_rounded: finds what turns them into dQ in q's
    dtype, None where no kernel does; each is given the addresses of those of `KEPT` last that its
    kernels have. places: where each of these begins in a workspace of so many bytes; shifts: bytes
    from there to the part's rows. block: rows of a block, floats of its dQ, and parts that these
    are of.
    """

    before: NamedLaunches
    part: NamedLaunches
    after: NamedLaunches
    find_rounded: Callable[[], NamedLaunches | None]
    places: tuple[int, ...]
    shifts: tuple[int, ...]
    workspace_bytes: int
    block: tuple[int, int, int]

    @cached_property
    def rounded(self) -> NamedLaunches | None:
        """The launch that turns sums into dQ in q's dtype, found once; None where there is none."""
        return self.find_rounded()

    @property
    def form(self) -> tuple[int, ...]:
        """The layout of the workspace."""
        return (*self.block, *self.places, self.workspace_bytes)

    def kept_at(self, addresses: Sequence[int]) -> tuple[int, ...]:
        """Addresses of what is kept of the part's rows. addresses: of all rows, as `places`."""
        return tuple([base + by for base, by in zip(addresses, self.shifts, strict=True)])


def prepare_part(
    given: Tensors, arguments: Arguments, gather: bool, device: Device, rows: AllRows
) -> PreparedPart | None:
    """Everything about a part but addresses; None where its kernels keep no sums of rows that begin
    and end where the part's do.

    given: as of `prepare_backward`, of the part; gather: whether threads copy operands.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    call = read(given, arguments, _WANTED, gather)
    q, k, v = unpacked(present(given["q"]), given["k"], given["v"], arguments.layout)
    if not all(x.numel() for x in (q, k, v)):
        return None
    kernels = _kernels_of(choose(call, device, q, k, v).kernels)
    if arguments.deterministic or kernels is None or not _has_whole_blocks(kernels, call, rows):
        return None

    def find_rounding() -> LoadedKernel | None:
        narrow = read(given, arguments._replace(out_dtype=None), _WANTED, gather)
        try:
            return _rounding_of(choose(narrow, device, q, k, v).kernels, kernels)
        except CacheError:  # of kernels that nobody may build here: sums are rounded by themselves
            return None

    return _with_launches(call, kernels, find_rounding, rows, device)


@dataclass(frozen=True, eq=False)
class _Kernels:
    """The kernels of rows whose dQ is summed in memory. kept: what they have of `KEPT`."""

    before: LoadedKernel
    main: LoadedKernel
    after: LoadedKernel
    kept: tuple[str, ...]

    @property
    def all(self) -> tuple[LoadedKernel, ...]:
        return self.before, self.main, self.after

    @property
    def form(self) -> tuple[int, int, int]:
        """Rows of a block, floats of its dQ, and parts that these are of."""
        main, after = self.main.kernel, self.after.kernel
        return main.row_block, main.dq_floats, after.block_ctas


def _kernels_of(kernels: Sequence[LoadedKernel]) -> _Kernels | None:
    """The three kernels of a backward, if it has these alone: one behind which all D are there, one
    whose tiles add to dQ in no order, which it leaves to one that rounds the sums."""
    if len(kernels) != 3:
        return None
    before, main = maker_of("d", kernels), maker_of("dk", kernels)
    if before is None or main is None or (after := _rounder_of(main, kernels)) is None:
        return None
    names = {field.name for field in main.kernel.fields} | {*main.kernel.workspace}
    alone = not names & {"o", "lse", "map_o", "map_dq", "dkv_acc"} and {"lse_log2", "d"} <= names
    dense = (main.kernel.q_seq, main.kernel.kv_seq) == ("dense", "dense")
    if not (alone and dense and _sums_of(main) in made_by(main.kernel)):
        return None
    # Whoever is in front of a part is no kernel that it may overtake.
    entry = replace(main.kernel, dependent=False)
    kept = tuple(name for name in KEPT if name in names)
    return _Kernels(before, replace(main, kernel=entry), after, kept)


def _sums_of(main: LoadedKernel) -> str:
    """The workspace that says that all tiles have added to sums of dQ: one of its own, or these."""
    return "dq_added" if "dq_added" in made_by(main.kernel) else "dq_acc"


def _rounder_of(main: LoadedKernel, kernels: Sequence[LoadedKernel]) -> LoadedKernel | None:
    """The kernel that reads what the main one has added to."""
    return next((x for x in kernels if _sums_of(main) in read_by(x.kernel)), None)


def _rounding_of(found: Sequence[LoadedKernel], kernels: _Kernels) -> LoadedKernel | None:
    """The kernel of a backward in 16 bits that rounds sums of dQ, if they lie as those of float32
    kernels do, and it needs nothing else."""
    main = maker_of("dk", found)
    if main is None or (after := _rounder_of(main, found)) is None:
        return None
    pointers = {field.name for field in after.kernel.fields if field.type == "ptr"}
    alike = replace(kernels, main=main, after=after).form == kernels.form
    return after if alike and pointers <= {"dq", *kernels.kept, *OF_KEYS} else None


def _has_whole_blocks(kernels: _Kernels, call: Backward, rows: AllRows) -> bool:
    """Whether the part's rows are whole blocks of all."""
    block, count = kernels.main.kernel.row_block, call.extents["q"].seq
    all_rows = extents_of({"q": rows.tensors["q"]}, call.arguments.layout)["q"].seq
    end = rows.first + count
    return rows.first % block == 0 and (end % block == 0 or end == all_rows)


def _with_launches(
    call: Backward,
    kernels: _Kernels,
    find_rounding: Callable[[], LoadedKernel | None],
    rows: AllRows,
    device: Device,
) -> PreparedPart:
    """The launches of a part and of all rows. find_rounding: finds what rounds sums of dQ."""
    layout = call.arguments.layout
    tensors = {**rows.tensors, "dq": TensorDesc.contiguous(rows.tensors["q"].shape, "float32")}
    known = extents_of({n: x for n, x in tensors.items() if n not in ("lse", "dlse")}, layout)
    of_all = {**call.extents, **known}
    of_part = {**of_all, **{name: call.extents[name] for name in ("q", "o", "d_o")}}
    block, q = kernels.main.kernel.row_block, of_all["q"]
    slots = q.batch * q.heads * -(-q.seq // block)
    numbers = {**call.scalars.numbers, "main_follows": 0, "all_q_blocks": -(-q.seq // block)}
    scalars = replace(call.scalars, numbers=numbers)
    offsets, size = lay_out_workspaces(kernels.all, q, scalars)
    bytes_of = workspace_bytes(kernels.main.kernel, q, numbers=numbers)
    absent = [name for name, x in call.given.items() if x is None]
    absent += fragment_values.absent_from(call.optional, call.arguments)
    there = [name for name, x in call.given.items() if x is not None]
    of_rows = [name for name in there if name in OF_ROWS]
    read_by_part = [name for name in there if name not in ("o", "lse", "dlse")]
    fixed, kept = dict.fromkeys(absent, 0), kernels.kept

    def ending(kernel: LoadedKernel) -> NamedLaunches:
        launches = (prepare(kernel, of_all, scalars),)
        return NamedLaunches(
            device=device,
            names=("dq", *kept),
            launches=launches,
            fixed=dict.fromkeys(OF_KEYS, 0),
        )

    def rounding() -> NamedLaunches | None:
        found = find_rounding()
        return None if found is None else ending(found)

    return PreparedPart(
        before=NamedLaunches(
            device=device,
            names=(*of_rows, *kept),
            launches=(prepare(kernels.before, of_all, scalars),),
            fixed=fixed,
        ),
        part=NamedLaunches(
            device=device,
            names=(*read_by_part, "dk", "dv", *kept),
            sources=sources_of(call.given, call.optional, call.arguments),
            launches=(prepare(kernels.main, of_part, scalars),),
            fixed=fixed,
            counts_tiles="tile_counter" in kernels.main.kernel.workspace,
        ),
        after=ending(kernels.after),
        find_rounded=rounding,
        places=tuple(offsets[name] for name in kept),
        shifts=tuple(rows.first // block * (bytes_of[name] // slots) for name in kept),
        workspace_bytes=size,
        block=kernels.form,
    )
