"""Appends that are prepared: the launch of a call's kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import SpecError
from ...kernels.family import Choice
from ...runtime.launch import prepare
from ...runtime.run_time import Extent, Scalars
from .. import kernel_choice
from ..append import CACHES, SCALES, AppendCall, spec_of
from ..kernel_choice import Device
from ..operands import extent
from ..prepared import Launches
from ..tensors import TensorDesc

MOST_TOKENS = 1 << 31


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedAppend(Launches):
    """An append for all calls that differ from it in addresses alone. operands: parameters of its
    tensors, in the order of `TENSORS` and then the turned queries, without absent ones."""

    operands: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        self._point(self.operands)


def prepare_append(
    tensors: Mapping[str, TensorDesc], call: AppendCall, device: Device
) -> PreparedAppend:
    """The launch of a call. tensors: descriptions of those that it has, and `o` beside `q`; call:
    of descriptions, too. Raises: SpecError, CompileError, LaunchError."""
    spec = spec_of(call)
    operands = tuple(tensors)
    if not (call.k.numel() and call.sequences):
        return PreparedAppend(device=device, operands=operands)
    (kernel,) = kernel_choice.kernels_of(spec, device, Choice())
    tokens = call.size("t") if call.layout == "thd" else call.size("b") * call.size("s")
    if tokens >= MOST_TOKENS:
        raise SpecError(f"{tokens} tokens; a kernel takes fewer than 2^31")
    new = {name: extent(tensors[name], call.layout) for name in ("k", "v")}
    turned = {name: extent(tensors[name], call.layout) for name in ("q", "o") if name in tensors}
    extents: dict[str, Extent] = {"q": new["k"], "o": new["k"], **new, **turned}
    queries = extents["q"]
    extents["q"] = queries._replace(heads=1)  # rows are tokens, of all heads together
    numbers = _numbers(tensors, call) | {"turned_heads": queries.heads}
    scalars = Scalars(1.0, numbers=numbers, sequences=call.sequences)
    launched = prepare(kernel, extents, scalars)
    absent = {name for _, name in launched.pointers} - {*operands}
    return PreparedAppend(
        device=device,
        operands=operands,
        launches=(launched,),
        fixed=dict.fromkeys(sorted(absent), 0),
    )


def _numbers(tensors: Mapping[str, TensorDesc], call: AppendCall) -> dict[str, int]:
    """Numbers of the kernel that only appends have."""
    table, cosines = tensors.get("page_table"), tensors.get("rotary_cos")
    pages, page_size, *_ = call.k_cache.shape
    numbers = {
        "packed": int(call.layout == "thd"),
        "pages": pages,
        "page_size": page_size,
        "table_columns": 1 if table is None else table.shape[1],
        "table_stride": 1 if table is None else table.stride()[0],
        "turned_step": int(not call.rotary_at_start),
        "rotary_dim": 0 if cosines is None else 2 * cosines.shape[1],
        "rotary_rows": 0 if cosines is None else cosines.shape[0],
        "rotary_pairs": int(call.rotary_interleaved),
        "rotary_wide": int(cosines is not None and cosines.element_size() == 4),
    }
    for name in CACHES:
        strides = zip(("batch", "row", "head"), tensors[name].stride(), strict=False)
        numbers |= {f"{name}_stride_{axis}": step for axis, step in strides}
    for name in SCALES:
        scale = tensors.get(name)
        steps: Sequence[int] = (0, 0) if scale is None or scale.ndim == 1 else scale.stride()
        pairs = zip(("batch", "head"), steps, strict=True)
        numbers |= {f"{name}_stride_{axis}": step for axis, step in pairs}
    return numbers
