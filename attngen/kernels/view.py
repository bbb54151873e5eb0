"""Views: what a template reads, in the parts that several families' views are made of.

A family's view is a frozen dataclass in its own folder (`view.py`); its fields are all that its
template names (`fill.fill_view`). It holds decisions and values, made here or there by small
functions: a template asks whether a field is set, and loops over it, no more. Macros under
templates/kernels/common take the parts of this module by value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..fragments.header import CAPTURED, Fragment, Operand
from ..runtime.program import KernelEntry
from ..spec.problem import DTYPE_BYTES, Problem
from .uses import FragmentUse, place_of

CPP_TYPES = {
    **{"i32": "int", "i64": "long long", "f32": "float", "ptr": "void*"},
    **{"tensor_map": "TensorMap", "sequence_map": "SequenceMap", "page_map": "PageMap"},
}
# Element types of products, as headers name them.
CPP_ELEMENTS = {"bf16": "Bf16", "fp16": "Fp16", "e4m3": "E4m3", "e5m2": "E5m2"}
MMA_ELEMENTS = {"bf16": "bf16", "fp16": "f16"}  # as PTX names them
# Tensors with a row a query, and those whose heads have as many columns as V.
_OF_QUERIES = ("q", "o", "d_o", "dq")
_OF_VALUES = ("v", "o", "d_o", "dv")


@dataclass(frozen=True)
class Member:
    """A member of the parameter struct: its C++ type and its name."""

    type: str
    name: str


@dataclass(frozen=True)
class KernelView:
    """The kernel's symbol, the template it is rendered from, and its parameter struct."""

    entry: str
    template: str
    members: tuple[Member, ...]
    params_bytes: int

    @property
    def is_placed(self) -> bool:
        """Whether parameters say where queries and keys stand."""
        return any(each.name == "diagonal" for each in self.members)

    @property
    def drops_places(self) -> bool:
        """Whether parameters say where what is dropped stands."""
        return any(each.name == "first_query" for each in self.members)

    @property
    def drop_key(self) -> str:
        """The struct of what the calls of one head of one sequence have in common."""
        return "PlacedDropoutKey" if self.is_placed else "DropoutKey"

    def drop_key_of(self, batch: str, head: str) -> str:
        """The key of a head of a sequence. batch, head: C++."""
        if self.is_placed:
            return f"drop_key_at(p, {batch}, {head})"
        return f"dropout_key(static_cast<const long long*>(p.rng_state), {batch}, {head})"

    @property
    def drop_row(self) -> str:
        """The struct that finds the calls of a row of scores, for what it drops."""
        return "PlacedDropRow" if self.is_placed else "DropRow"

    @property
    def drop_calls(self) -> str:
        """The struct that finds the calls of a fragment of scores, for what it drops."""
        return "PlacedDropCalls" if self.is_placed else "DropCalls"

    def diagonal_of(self, q_len: str, batch: str) -> str:
        """The key on the first query's diagonal, of the `kv_len` of a sequence. q_len, batch: C++,
        its queries and which it is."""
        if self.is_placed:
            return f"placed_number(p, {batch}, kPlacedDiagonal, p.diagonal)"
        return f"p.bottom_right ? kv_len - {q_len} : 0"

    def draw(self, into: str) -> str:
        """The start of the call that draws what is dropped. into: C++, what holds it."""
        return f"attngen::draw({into}, " if self.is_placed else f"{into}.draw("


@dataclass(frozen=True)
class Value:
    """A value of a fragment's struct: a parameter, or an element of the tensor that it points to.

    axes: of the tensor, which the context indexes; none for a parameter. factor: the C++ name of
    what the value is multiplied by, or empty. of_all: the parameter that holds the number of all
    sequences, for calls without a tensor of numbers of each; empty where there is none.
    """

    parameter: str
    axes: tuple[str, ...] = ()
    factor: str = ""
    of_all: str = ""


@dataclass(frozen=True)
class FragmentView:
    """A fragment in a kernel: its struct, its name in lists, and the values that fill it."""

    struct: str
    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class MaskView(FragmentView):
    """A mask in a list. made: C++, what makes the mask itself, of its name and the context."""

    made: str


@dataclass(frozen=True)
class SequenceNumber:
    """A number of each sequence that a mask reads: its name, and whether a tensor may hold it."""

    type: str
    name: str
    read: bool


@dataclass(frozen=True)
class SequenceMaskView:
    """A mask some of whose numbers are of a sequence, which is known where the list is asked.

    struct: what a list has of it; mask: the struct of the mask itself, made of the numbers.
    """

    struct: str
    mask: str
    numbers: tuple[SequenceNumber, ...]


@dataclass(frozen=True)
class MaskListView:
    """A kernel's masks, and on which sides any of them limits the keys of a row.

    of_sequences: those that read numbers of sequences.
    """

    fragments: tuple[MaskView, ...]
    of_sequences: tuple[SequenceMaskView, ...]
    bounds_left: bool
    bounds_right: bool


@dataclass(frozen=True)
class ScoreView(FragmentView):
    """A score in a list. meets_scaled: whether scores are multiplied by `unit` before it, as it
    takes scaled ones; additive: whether its derivative is 1."""

    meets_scaled: bool
    additive: bool


@dataclass(frozen=True)
class ScoreListView:
    """A kernel's scores in the order in which they apply, as a struct and what makes it.

    name, function: C++ names of the struct and of the function that makes it. place: C++, what
    fragments are told of an element, of which there is a kind with a scale of its product, and one
    with lines of a tile. unit: the member that a tile's elements or
    results are multiplied by (`unit`, `tile_unit`), unit_value: what fills it, both empty where
    there is none. reads_tile: whether a score reads a tensor in tiles; scales_tile: whether its
    elements are multiplied by `tile_unit`. scales_result: whether scores are multiplied by `unit`
    after the last fragment. small: the name of the first fragment where it has a cheaper form for
    small scores, else empty; after_small: those behind it. differentiates: whether the struct has
    the derivative. reads_params, reads_tensors, reads_unit: whether making it takes the parameters,
    the context, and the unit of scores; reads_per_unit: whether also the unit's reciprocal.
    learned: the name of the score that learns what it reads, empty where none does; before_learned:
    those before it.
    """

    name: str
    function: str
    place: str
    scores: tuple[ScoreView, ...]
    unit: str
    unit_value: str
    reads_tile: bool
    scales_tile: bool
    scales_result: bool
    small: str
    after_small: tuple[ScoreView, ...]
    differentiates: bool
    reads_params: bool
    reads_tensors: bool
    reads_unit: bool
    reads_per_unit: bool
    learned: str
    before_learned: tuple[ScoreView, ...]


@dataclass(frozen=True)
class TensorView:
    """A tensor whose rows a kernel finds by its address and strides.

    sequence: C++, the sequence that says how many rows it has. dense: whether each sequence begins
    at the batch's own row; packed: whether all lie behind each other, so that there is no stride of
    the batch. gathered: whether columns may lie apart, and are counted at run time by
    `columns_parameter`. word: the C++ type that holds an element's bits; element_bytes, row_bytes:
    of an element, and of a head's row; columns: of that.
    """

    name: str
    sequence: str
    dense: bool
    packed: bool
    gathered: bool
    columns_parameter: str
    word: str
    element_bytes: int
    row_bytes: int
    columns: int

    @property
    def is_float(self) -> bool:
        """Whether elements are float32."""
        return self.element_bytes == 4

    @property
    def store(self) -> str:
        """The function that stores rows of accumulators in it."""
        if self.is_float:
            return "store_float_rows"
        return "store_rows" if self.gathered else "store_whole_rows"

    @property
    def stored_columns(self) -> str:
        """C++, the columns that `store` is told of, empty where it has all."""
        if self.gathered:
            return f"p.{self.columns_parameter}"
        return str(self.columns) if self.is_float else ""


def kernel_view(kernel: KernelEntry, template: str) -> KernelView:
    """The part of a kernel's launch description that its source repeats."""
    members = tuple(Member(CPP_TYPES[field.type], field.name) for field in kernel.fields)
    return KernelView(kernel.entry, template, members, kernel.params_bytes)


def fragment_view(use: FragmentUse) -> FragmentView:
    """A fragment with all the parameters that fill it."""
    fragment = use.fragment
    values = zip(use.fields, fragment.operands, strict=True)
    return FragmentView(
        fragment.struct, fragment.name, tuple(_value(name, each) for name, each in values)
    )


def captured_view(use: FragmentUse) -> FragmentView:
    """A fragment of a traced mask, with all the parameters that fill it."""
    values = zip(use.fields, use.fragment.operands, strict=True)
    filled = tuple(value for name, each in values for value in _values(name, each, ""))
    return FragmentView(use.fragment.struct, use.fragment.name, filled)


def _value(name: str, operand: Operand, factor: str = "") -> Value:
    """The value that fills a struct from the parameter of an operand."""
    of_all = f"{name}_of_all" if operand.domain == "sequence" else ""
    return Value(name, operand.axes, factor, of_all)


def _values(name: str, operand: Operand, factor: str) -> Iterable[Value]:
    """The values of an operand: of a captured tensor where it lies, and stride and size of each
    axis."""
    if operand.domain != CAPTURED:
        return [_value(name, operand, factor)]
    facts = [f"{name}_{what}_{axis}" for axis in operand.axes for what in ("stride", "size")]
    return [Value(each) for each in (name, *facts)]


def mask_view(use: FragmentUse) -> MaskView:
    """A mask in a list, which is made where no sequence is known."""
    fragment = use.fragment
    if not fragment.reads_sequences:
        view = fragment_view(use)
        return MaskView(view.struct, view.name, view.values, made=view.name)
    values: list[Value] = []
    for name, operand in zip(use.fields, fragment.operands, strict=True):
        more = ("", "_of_all", "_stride_batch") if operand.axes else ("",)
        values += [Value(name + end) for end in more]
    struct = f"{fragment.struct}OfSequences"
    return MaskView(struct, fragment.name, tuple(values), made=f"{fragment.name}.of(ctx)")


def sequence_mask_view(fragment: Fragment) -> SequenceMaskView:
    """The view of a mask that reads numbers of sequences, as a list has it."""
    numbers = tuple(
        SequenceNumber(CPP_TYPES[each.dtype], each.name, read=bool(each.axes))
        for each in fragment.operands
    )
    return SequenceMaskView(f"{fragment.struct}OfSequences", fragment.struct, numbers)


def mask_list_view(masks: Iterable[FragmentUse]) -> MaskListView:
    """The list of a kernel's masks, which may be empty."""
    masks = tuple(masks)
    return MaskListView(
        tuple(map(mask_view, masks)),
        tuple(sequence_mask_view(x.fragment) for x in masks if x.fragment.reads_sequences),
        bounds_left=any(use.bounds_left for use in masks),
        bounds_right=any(use.bounds_right for use in masks),
    )


def score_list_view(
    scores: Sequence[FragmentUse],
    masks: Iterable[FragmentUse],
    *,
    gradient: bool = False,
    scales: bool = False,
    keeps_lines: bool = False,
    name: str = "ScoreList",
    function: str = "score_list",
) -> ScoreListView | None:
    """The list of a kernel's scores; None where it has none.

    gradient: whether the kernel wants derivatives. scales: whether scores leave the list scaled,
    from the first fragment on that takes scaled ones, or in the end; else all are in the units of
    products. keeps_lines: whether the kernel keeps lines of tiles. name, function: C++ names of the
    struct and of what makes it.
    """
    if not scores:
        return None
    first_scaled = next(
        (place for place, use in enumerate(scores) if scales and use.fragment.scaled), len(scores)
    )
    views = tuple(
        _score_view(use, meets_scaled=scales and use.fragment.scaled, scaled=place >= first_scaled)
        for place, use in enumerate(scores)
    )
    # Dimensions of what meets scores in the units of products.
    powers = [power for use in scores[:first_scaled] for power in use.score_powers]
    tiled = next((use for use in scores if use.tile), None)
    scales_tile = tiled is not None and not scales and tiled.tile_power != 0
    small = scores[0].fragment.small
    learned = [place for place, use in enumerate(scores) if use.fragment.learned and not scales]
    return ScoreListView(
        name=name,
        function=function,
        place=place_of(scores, masks, keeps_lines=keeps_lines, derives=gradient),
        scores=views,
        unit="tile_unit" if scales_tile else "unit" if tiled and scales else "",
        unit_value="per_unit" if scales_tile else "unit" if scales else "",
        reads_tile=tiled is not None,
        scales_tile=scales_tile,
        scales_result=scales and first_scaled == len(scores),
        small=scores[0].fragment.name if small else "",
        after_small=views[1:] if small else (),
        differentiates=gradient and not all(use.fragment.additive for use in scores),
        reads_params=any(use.fields for use in scores),
        reads_tensors=any(use.reads_tensors for use in scores),
        reads_unit=scales or any(powers),
        reads_per_unit=1 in powers,
        learned=views[learned[0]].name if learned else "",
        before_learned=views[: learned[0]] if learned else (),
    )


def _score_view(use: FragmentUse, *, meets_scaled: bool, scaled: bool) -> ScoreView:
    """A score with what it reads, but elements of tiles, in the units of the scores it meets.
    scaled: whether these are scaled."""
    factors = {} if scaled else {1: "per_unit", -1: "unit"}
    fragment = use.fragment
    values = tuple(
        value
        for name, operand in zip(use.fields, fragment.operands, strict=True)
        if name != use.tile
        for value in _values(name, operand, factors.get(operand.score_power, ""))
    )
    return ScoreView(fragment.struct, fragment.name, values, meets_scaled, fragment.additive)


def tensor_view(problem: Problem, name: str) -> TensorView:
    """An operand, the output or a gradient of a problem, as a kernel addresses it."""
    kind = problem.q_seq if name in _OF_QUERIES else problem.kv_seq
    of_values = name in _OF_VALUES
    element_bytes = DTYPE_BYTES[problem.dtype_of(name)]
    return TensorView(
        name=name,
        sequence="q_sequence(p)" if name in _OF_QUERIES else "kv_sequence(p)",
        dense=kind == "dense",
        packed=kind == "packed",
        gathered=problem.gather,
        columns_parameter="dim_v" if of_values else "dim_qk",
        word="u32" if element_bytes == 4 else "unsigned short",
        element_bytes=element_bytes,
        row_bytes=element_bytes * (problem.head_dim_v if of_values else problem.head_dim_qk),
        columns=problem.head_dim_v if of_values else problem.head_dim_qk,
    )
