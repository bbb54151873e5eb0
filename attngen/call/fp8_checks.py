"""Whether the dtypes, scales and output of a call belong together, by the names of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import eq
from typing import NamedTuple

from ..spec.call_arguments import DESCALES, TOKEN_AXES
from .tensors import FP8, Described, dtype_name, is_described, name_of, named

FLOATS = ("float16", "bfloat16", "float32", "float64")
BESIDE_CACHE = ("float16", "bfloat16")
CACHE_SCALES = ("descale_k", "descale_v")
BIAS_DTYPE = "bfloat16"  # of what kernels add to scores beside FP8 operands
OUT_DTYPES = (*BESIDE_CACHE, *FP8)
# Scales that a backward alone takes, float32 [1]: of the output and its gradient, by which dS is
# stored, and by which gradients in 8 bits are.
STORED_SCALES = ("scale_dq", "scale_dk", "scale_dv")
BACKWARD_SCALES = ("descale_o", "descale_do", "scale_dp", "descale_dp", *STORED_SCALES)
Agree = Callable[[int, int], bool]  # whether two sizes are the same, as far as is known


def dtype_violations(q: str, k: str, v: str) -> Iterator[str]:
    """Q, K and V have one floating dtype, or K and V one of the FP8 formats and Q one of them or
    16 bits."""
    together = FP8 if q in FP8 else (q, *FP8) if q in BESIDE_CACHE else (q,)
    if q not in (*FLOATS, *FP8) or k not in together or k != v:
        yield (
            f"q, k and v need one dtype of {', '.join(FLOATS)}, {', '.join(FP8)}; FP8 in k and v "
            f"alike may also stand beside a q of the other FP8 format, or of "
            f"{' or '.join(BESIDE_CACHE)}; got {q}, {k}, {v}. Cast them."
        )


class TokenAxis(NamedTuple):
    """Tokens that have scales of their own: positions of b sequences of one room, or packed tokens
    of all of them, whose scales are those of one."""

    b: int
    length: int
    packed: bool = False


class ScaledSizes(NamedTuple):
    """Sizes of a call that its scales may have: sequences, heads of K and V, heads of Q, and tokens
    of Q and of K, None where no scale is a token's."""

    b: int
    h_kv: int
    h_q: int
    of_q: TokenAxis | None = None
    of_kv: TokenAxis | None = None

    def shapes_of(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shapes that a scale may have, by how a message says them."""
        if name not in DESCALES:
            return {"[1]": (1,)}
        b, h_kv = self.b, self.h_kv
        found: dict[str, tuple[int, ...]] = {"[1]": (1,), f"[b={b}, h_kv={h_kv}]": (b, h_kv)}
        side, h, tokens = "q", self.h_q, self.of_q
        if name != "descale_q":
            side, h, tokens = "kv", h_kv, self.of_kv
        if tokens is not None:
            batch, axis = ("1", f"t_{side}") if tokens.packed else (f"b={tokens.b}", f"s_{side}")
            shape = (tokens.b, h, tokens.length)
            found[f"[{batch}, h_{side}={h}, {axis}={tokens.length}]"] = shape
        return found


def scale_violations(
    scales: Mapping[str, Described | None],
    sizes: ScaledSizes,
    floats: Sequence[str] = FLOATS,
    agree: Agree = eq,
) -> Iterator[str]:
    """Shapes and dtypes of the scales, by their names; S has both of its scales or neither, and
    all of Q, K and V one a token, or none. floats: the dtypes that they may have."""
    for name, scale in scales.items():
        shapes = sizes.shapes_of(name)
        if scale is not None and not _fits(scale, floats, [*shapes.values()], agree):
            got = named(scale) if is_described(scale) else repr(scale)
            wanted = f"float32 {' or '.join(shapes)}"
            yield f"{name} needs {wanted}; got {got}. Pass a tensor on q's device."
    axes = {name: len(getattr(scales[name], "shape", ())) for name in DESCALES}
    if TOKEN_AXES in axes.values() and len({*axes.values()}) > 1:
        others = [name for name, count in axes.items() if count != TOKEN_AXES]
        yield (
            f"{', '.join(others)}: scales a token and head are those of q, k and v together. Pass "
            "all three as [b, h, s], of packed tokens [1, h, t]."
        )
    if (scales["scale_s"] is None) != (scales["descale_s"] is None):
        given = "scale_s" if scales["descale_s"] is None else "descale_s"
        yield (
            f"scale_s and descale_s belong together, each the other's reciprocal; got {given} "
            f"alone. Pass both, or neither for a power of two."
        )


def backward_violations(scales: Mapping[str, Described | None]) -> Iterator[str]:
    """Scales of q, k and v, by their names, that a backward in 8 bits does not take."""
    for name in DESCALES:
        scale = scales[name]
        if scale is not None and tuple(scale.shape) != (1,):
            yield f"{name} {[*scale.shape]}: a backward takes one for the tensor, float32 [1]"


def output_violations(
    out_dtype: object,
    has_scale: bool,
    known: Sequence[object] = OUT_DTYPES,
    fp8: Sequence[object] = FP8,
) -> Iterator[str]:
    """The dtype of the output of an FP8 call, and whether it has a scale. known: dtypes that it may
    have, as a library has them if not by their names; fp8: those of 8 bits."""
    if out_dtype not in known:
        yield (
            f"out_dtype beside FP8 q, k and v needs one of {', '.join(map(name_of, known))}, or "
            f"None for bfloat16; got {out_dtype!r}. Pass one."
        )
    elif has_scale and out_dtype not in fp8:
        yield (
            f"scale_o scales an FP8 output; got it with out_dtype={name_of(out_dtype)}. Leave it "
            f"out, or pass an FP8 out_dtype."
        )


def _fits(
    x: Described, floats: Sequence[str], shapes: Sequence[tuple[int, ...]], agree: Agree
) -> bool:
    if not is_described(x) or dtype_name(x) not in floats:
        return False
    return any(agree_all(x.shape, shape, agree) for shape in shapes)


def agree_all(shape: Sequence[int], other: Sequence[int], agree: Agree = eq) -> bool:
    """Whether shapes are the same, as far as is known."""
    return len(shape) == len(other) and all(
        [agree(one, two) for one, two in zip(shape, other, strict=True)]
    )
