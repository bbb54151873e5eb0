"""A backward in 8 bits beside one of 16: its scales, the spec of its kernels, and its faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..runtime.load import LoadedKernel
from ..runtime.run_time import Extent, blocks_of
from ..spec.attention_spec import AttentionSpec, dtype_name
from ..spec.mixed import MIXED
from .checks import device_violations
from .fp8_checks import BACKWARD_SCALES, STORED_SCALES, backward_violations
from .numbers import Arguments
from .operands import output_dtype, output_shapes, sequences_of
from .prepared import Output
from .tensors import FP8, TensorDesc, named
from .tensors import dtype_name as name_of_dtype

MAXIMA = ("amax_dp", "amax_dq", "amax_dk", "amax_dv")
Tensors = Mapping[str, "TensorDesc | None"]


def spec_of_gradients(
    forward: AttentionSpec, tensors: Mapping[str, TensorDesc], gradients: str, mixed: bool
) -> AttentionSpec:
    """The spec of the kernels. forward: of the call; tensors: with o and d_o; gradients: the name
    of their dtype; mixed: whether products of weights and of dS have 16 bits."""
    return replace(
        forward,
        out_dtype=dtype_name(tensors["o"].dtype),
        d_o_dtype=dtype_name(tensors["d_o"].dtype),
        grad_dtype=dtype_name(gradients),
        backward=MIXED if mixed else None,
    )


def key_tiles(kernels: Sequence[LoadedKernel], k: Extent, sequences: int) -> dict[str, int]:
    """The number of tiles of keys whose transposes need room, by its name; none where no kernel
    transposes them."""
    turning = (each.kernel for each in kernels if each.kernel.turned_key_bytes)
    if (kernel := next(turning, None)) is None:
        return {}
    tiles = blocks_of(k, kernel.tile_rows, kernel.kv_seq, sequences)
    return {"key_tiles": tiles * k.batch * k.heads}


def maxima(arguments: Arguments) -> tuple[Output, ...]:
    """Outputs of the maxima, where the call wants them."""
    names = MAXIMA if arguments.amax else ()
    return tuple(Output(name, (1,), (1,), "float32", 0.0, preset=True) for name in names)


def violations(
    tensors: Mapping[str, TensorDesc], given: Tensors, arguments: Arguments, *, mixed: bool = False
) -> Iterator[str]:
    """Faults of the tensors and scales that the backward takes beside those of its forward.

    tensors: q, k, v, o and d_o as views; given: all by their names; mixed: whether dS has 16 bits,
    which want no scale.
    """
    q, v = tensors["q"], tensors["v"]
    out, lse = output_shapes(q, v, arguments)
    o_dtype = name_of_dtype(tensors["o"])
    for name, dtypes in (("o", (*FP8, "bfloat16", "float16")), ("d_o", FP8)):
        x = tensors[name]
        if name_of_dtype(x) not in dtypes or tuple(x.shape) != out:
            yield f"{name} needs {' or '.join(dtypes)} {[*out]}; got {named(x)}"
    for name in ("lse", "dlse"):
        row = given[name]
        if row is not None and (name_of_dtype(row) != "float32" or tuple(row.shape) != lse):
            yield f"{name} needs float32 {[*lse]}; got {named(row)}"
    if sequences_of(q, given, arguments.layout) < 0:
        return  # said of the lengths
    yield from device_violations({"q": q, **{name: given[name] for name in BACKWARD_SCALES}})
    yield from _scale_violations(given, o_dtype, output_dtype(q, arguments))
    scales = given["scale_dp"], given["descale_dp"]
    if any(x is None for x in scales) and not (mixed and scales == (None, None)):
        yield (
            "scale_dp and descale_dp are needed, each the other's reciprocal: kernels of 8 bits "
            "choose no scale of dS yet, mixed ones want neither. Pass both, float32 [1]."
        )


def _scale_violations(given: Tensors, o_dtype: str, gradients: str) -> Iterator[str]:
    """Faults of the scales. o_dtype: the output's; gradients: theirs."""
    for name in BACKWARD_SCALES:
        scale = given[name]
        if scale is None:
            continue
        if name_of_dtype(scale) != "float32" or tuple(scale.shape) != (1,):
            yield f"{name} needs float32 [1]; got {named(scale)}. Pass a tensor on q's device."
        if name in STORED_SCALES and gradients not in FP8:
            yield f"{name} scales a gradient in 8 bits; got it beside {gradients}. Leave it out."
    if given["descale_o"] is not None and o_dtype not in FP8:
        yield f"descale_o belongs to an output in 8 bits; o is {o_dtype}. Leave it out."
    yield from backward_violations(given)
