"""AttentionSpec: what the user says, as a value, a TOML file or a call."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..fragments import features
from ..fragments.program import has_program
from ..io import toml_text
from ..io.text import printable, shortened
from ..io.values import DataError, from_data, to_data
from ..targets.target import DEFAULT
from . import layouts, plain
from .call_arguments import (
    ARGUMENTS,
    call_arguments,
    fragment_arguments,
    scaling_of,
    score_switches,
)
from .functions import FunctionError, without_functions
from .masks import JOINT, masks_of
from .tables import PRODUCT_LIMIT, REASON_LIMIT, Place, Table, at_most, count_specs, tables_of

_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
DTYPES_16BIT = ("fp16", "bf16")
DTYPES_8BIT = ("e4m3", "e5m2")
PROMPT_QUERIES = 128  # of a head of a sequence: they fill a tile of the forward
MAX_HEAD_DIM = 256  # of kernels that do not split keys, but for those of 16 bits (head_dims.py)
MAX_TRAINED_HEAD_DIM = 512  # of gradients in 16 bits
DECODE_ROWS = 64  # of a tile of the kernels that split keys: queries times the heads of a group
SHORT_HEAD_DIM = 128  # up to which a forward has tiles of 64 queries, two at once on an SM


@dataclass(frozen=True)
class AttentionSpec:
    """One attention variant, in the terms of the main call; features that a call gives values
    to (a window, a softcap, dropout) are only switched on here, their values are run-time.

    `head_dim_v`, `kv_dtype` and `out_dtype` default to their counterparts of Q, the latter to bf16
    where Q is FP8 (e4m3, e5m2), which K and V may be beside 16 bits, too; `out_dtype` "fp32" asks
    for the float32 partial output that split computations combine. Of a backward in 8 bits
    `grad_dtype` is the gradients', bf16 by default, and `d_o_dtype` that of the output's gradient,
    e5m2 by default; its `out_dtype` is the output's that it reads; `backward` "mixed" leaves dV, dK
    and dQ products of 16 bits. Of one in 16 bits `grad_dtype`
    "fp32" asks for gradients that are parts of sums. `seqused` says that sequences of a dense
    format have lengths of their own, as a padding mask does; `decode` that there are few queries a
    sequence, so that the kernel splits the keys; `gather` that rows or addresses of operands are no
    multiples of 16 bytes, or their last axis is not contiguous, so that threads copy what the copy
    engine cannot. Of head dims that are no multiples of 8 the same is true without saying.
    `scaling` "token" says that FP8 operands have a scale a token and head, so that under a causal
    mask no later token changes a bit of an earlier output.
    `positions` says that calls are parts of longer ones, and tell where; `continues` that their
    float32 output and LSE join those of earlier parts. `mask` may name several
    that intersect, `causal+chunked`; `score_mod` scores of fragments, in their order. `attngen
    list` prints what fields may hold, docs/guide/specs.md what each means.
    """

    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "bf16"
    kv_dtype: str | None = None
    out_dtype: str | None = None
    grad_dtype: str | None = None
    d_o_dtype: str | None = None
    backward: str | None = None
    scaling: str = "tensor"
    layout: str = "bshd"
    mask: str = "none"
    window: bool = False
    attn_mask: bool = False
    bias: str = "none"
    alibi: bool = False
    softcap: bool = False
    score_mod: bool | str = False
    mask_mod: bool | str = False
    softmax: str = "vanilla"
    seqused: bool = False
    decode: bool = False
    gather: bool = False
    dropout: bool = False
    positions: bool = False
    continues: bool = False
    return_max_logit: bool = False
    deterministic: bool = False
    directions: tuple[str, ...] = ("fwd",)
    arch: tuple[str, ...] = (DEFAULT.name,)
    name: str | None = None

    @property
    def widens(self) -> bool:
        """Whether K and V are FP8 beside a Q that is not."""
        return self.kv_dtype in DTYPES_8BIT and self.dtype not in DTYPES_8BIT

    @property
    def title(self) -> str:
        """The spec's name, or a readable one made from what it asks for, on one line."""
        if self.name:
            return printable(self.name)
        plain = AttentionSpec(head_dim=self.head_dim)
        differing = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        ]
        return printable(" ".join([f"head_dim={self.head_dim}", *differing]))

    @property
    def gathers(self) -> bool:
        """Whether threads copy the operands."""
        odd = self.head_dim % 8 or (self.head_dim_v or 0) % 8
        return self.gather or (odd > 0 and self.dtype in DTYPES_16BIT and not self.widens)

    @classmethod
    def from_call(cls, q: Any, k: Any, v: Any, **arguments: Any) -> AttentionSpec:
        """The spec that `attngen.attention(q, k, v, **arguments)` needs.

        q, k, v: tensors (anything with `dtype` and `shape`) in the call's layout.
        Raises: SpecError where the layout is unknown or does not fit the tensors, and where
        `attention` has no argument of a name.
        """
        others = {name: x for name, x in arguments.items() if name not in ARGUMENTS}
        if not others:
            return cls.of_arguments((q, k, v), arguments)
        known = features.scan()  # only here: torch.compile cannot trace file access
        taken = call_arguments(known) | fragment_arguments(known)
        if unknown := [name for name in others if name not in taken]:
            raise SpecError([f"attention has no argument {name!r}" for name in unknown])
        spec = cls.of_arguments((q, k, v), arguments)
        return dataclasses.replace(spec, **score_switches(others, known))

    @classmethod
    def of_arguments(cls, operands: Sequence[Any], arguments: Mapping[str, Any]) -> AttentionSpec:
        """The spec as `from_call` says, of q, k and v, and of `ARGUMENTS` by their names.

        Raises: SpecError.
        """
        q, k, v = operands
        arguments = {**arguments, **plain.differing(arguments)}
        for name in ("attn_mask", "bias"):
            if (meant := plain.causal_variant(arguments.get(name))) is not None:
                by_name = plain.is_mask_by_name(arguments, name, q, k, v)
                arguments |= {name: None, **({"mask": meant} if by_name else {"attn_mask": True})}
        layout = arguments.get("layout", "bshd")
        parsed = layouts.parse(layout)
        layouts.check_operands(parsed, q, k, v)
        last = (k if k is not None else q, v if v is not None else k if k is not None else q)
        window = arguments.get("window", (-1, -1))
        mask, score_mod = arguments.get("mask", "none"), arguments.get("score_mod")
        mask_mod, has_mask = plain.given_masks(arguments)
        mask = "arbitrary" if has_mask and mask == "none" else mask
        bias_type = arguments.get("bias_type", "post_scale")
        out_dtype, slopes = arguments.get("out_dtype"), arguments.get("alibi_slopes")
        formats = zip(("q", "kv"), parsed.formats, strict=True)
        lengths = [f"seqused_{side}" for side in ("q", "kv")]
        lengths += [f"cu_seqlens_{side}" for side, axes in formats if axes != "thd"]
        spec = cls(
            head_dim=q.shape[-1],
            head_dim_v=None if last[1].shape[-1] == q.shape[-1] else last[1].shape[-1],
            dtype=dtype_name(q.dtype),
            kv_dtype=None if last[0].dtype == q.dtype else dtype_name(last[0].dtype),
            out_dtype=None if out_dtype is None else dtype_name(out_dtype),
            layout=layout,
            mask=mask,
            attn_mask=has_mask,
            window=plain.is_on(any([side is not None and side >= 0 for side in window])),
            bias=bias_type if arguments.get("bias") is not None else "none",
            alibi=slopes is not None and slopes is not False or bias_type == "alibi",
            softcap=plain.is_on(arguments.get("softcap", 0.0)),
            score_mod=score_mod if isinstance(score_mod, str) else score_mod is not None,
            mask_mod=mask_mod,
            softmax=arguments.get("softmax", "vanilla"),
            seqused=any([arguments.get(name) is not None for name in lengths]),
            dropout=plain.is_on(arguments.get("dropout_p", 0.0) > 0),
            positions=any([arguments.get(name) is not None for name in ("positions", "places")]),
            scaling=scaling_of(arguments),
            return_max_logit=bool(arguments.get("return_max_logit", False)),
            deterministic=bool(arguments.get("deterministic") or False),
        )
        given = [x for x in (q, k, v) if hasattr(x, "stride")]
        strides = (layouts.is_boxed(x.shape, x.stride(), x.element_size()) for x in given)
        if not (spec.dtype not in DTYPES_16BIT or parsed.paged or all(strides)):
            spec = dataclasses.replace(spec, gather=True)
        q_shape, k_shape = (layouts.shape_of(parsed, name, q, k) for name in ("q", "k"))
        ends = arguments.get("cu_seqlens_q")
        sequences = None if ends is None else ends.shape[0] - 1
        decode = is_decode(spec, q_shape, k_shape, arguments.get("num_splits"), sequences)
        return dataclasses.replace(spec, decode=decode)


# What kernels that split keys leave out.
_BESIDE_SPLITS = ("attn_mask", "mask_mod", "dropout")


def is_decode(
    spec: AttentionSpec,
    q: Sequence[int],
    k: Sequence[int],
    num_splits: int | None,
    sequences: int | None = None,
) -> bool:
    """Whether a call reaches the kernels that split keys: those over pages whose sequences have
    fewer than PROMPT_QUERIES queries (packed ones on average) and nothing that these kernels leave
    out, or keys of 8 bits of wider heads than others take, and dense 16-bit ones whose queries,
    with the heads of a group, fill no more than a tile, but for those whose heads have a tile of
    their own either way and few keys to split; of all, those that say `num_splits`.

    spec: the call's, whatever it says of this; q, k: shapes in the layout's formats; sequences: how
    many the packed queries are of.
    """
    layout = layouts.parse(spec.layout)
    more = spec.bias != "none" or spec.positions
    more = more or any([getattr(spec, name) for name in _BESIDE_SPLITS])
    more = more or spec.score_mod is True or is_traced(spec)  # a function
    if layout.paged:
        tokens = layouts.size(q, layout.q_format, "t" if layout.q_format == "thd" else "s")
        few = tokens < PROMPT_QUERIES * (max(1, sequences or 1) if layout.q_format == "thd" else 1)
        wide = spec.widens and max(spec.head_dim, spec.head_dim_v or 0) > MAX_HEAD_DIM
        return (few and not more) or wide or bool(num_splits)
    if (
        spec.dtype not in DTYPES_16BIT
        or spec.gathers
        or spec.kv_dtype not in (None, spec.dtype, *DTYPES_8BIT)
        or spec.out_dtype not in (None, spec.dtype)
        or more
    ):
        return False
    if "thd" in layout.formats:
        return bool(num_splits)
    heads_q = layouts.size(q, layout.q_format, "h")
    heads_kv = max(1, layouts.size(k, layout.kv_format, "h"))
    few = layouts.size(q, layout.q_format, "s") * heads_q <= DECODE_ROWS * heads_kv
    # Measured at 32 and 64 tokens, 8 to 1024 heads in all: 1.1 to 2.2 times as fast.
    lone = heads_q == heads_kv and layouts.size(k, layout.kv_format, "s") <= DECODE_ROWS
    return bool(num_splits) or (few and not (lone and has_short(spec)))


def is_traced(spec: AttentionSpec) -> bool:
    """Whether a score of its own comes from a callable, which asks for each element's head."""
    return isinstance(spec.score_mod, str) and has_program(spec.score_mod.split(JOINT))


def has_short(spec: AttentionSpec) -> bool:
    """Whether its forward has a kernel with tiles of 64 queries: dense 16-bit operands that the
    copy engine moves, without what is read or drawn beside the scores."""
    layout = layouts.parse(spec.layout)
    masks = masks_of(spec.mask)
    lengths = spec.seqused or masks.padding or "thd" in layout.formats
    beside = spec.bias != "none" or spec.attn_mask or masks.arbitrary or spec.dropout
    beside = beside or bool(spec.mask_mod)
    beside = beside or is_traced(spec)
    one_dtype = {spec.kv_dtype, spec.out_dtype} <= {None, spec.dtype}
    return (
        not (spec.decode or lengths or layout.paged or spec.gathers or beside)
        and (one_dtype and spec.dtype in DTYPES_16BIT)
        and max(spec.head_dim, spec.head_dim_v or 0) <= SHORT_HEAD_DIM
    )


def dtype_name(dtype: Any) -> str:
    """attngen's name of a dtype of torch, JAX or NumPy: `torch.bfloat16`, `bfloat16` → `bf16`."""
    return _DTYPES.get(str(dtype).removeprefix("torch."), str(dtype))


@dataclass(frozen=True)
class Placed:
    """A spec of a file, and the table that it is from."""

    spec: AttentionSpec
    place: Place


def load_specs(path: str | os.PathLike[str]) -> tuple[AttentionSpec, ...]:
    """Every spec of a TOML file: `[defaults]`, `[[kernel]]` tables, lists as products.

    Raises: SpecError with every unknown key, wrong type and repeated name in the file, and the
    lines that they are at.
    """
    return tuple(each.spec for each in load_placed([path]))


def load_placed(paths: Iterable[str | os.PathLike[str]]) -> tuple[Placed, ...]:
    """The specs of several files. Raises: SpecError with the defects of every file."""
    found: list[Placed] = []
    reasons: list[str] = []
    for path in paths:
        origin = printable(os.fspath(path))
        try:
            document = toml_text.read(path)
            left = PRODUCT_LIMIT - len(found)
            folder = Path(path).parent
            found += _parse(document.data, origin, document.lines, left, folder)
        except SpecError as error:
            reasons += error.reasons
        except OSError as error:
            reasons.append(f"{origin}: {error.strerror or error}")
        except ValueError as error:  # not only TOML's own: huge numbers, too
            reasons.append(f"{origin}: {shortened(str(error))}")
    if reasons:
        raise SpecError(reasons)
    return tuple(found)


def parse_specs(data: Mapping[str, Any], origin: str) -> tuple[AttentionSpec, ...]:
    """The specs of a parsed file; `origin` names it in errors. Raises: as `load_specs`."""
    return tuple(each.spec for each in _parse(data, origin, toml_text.Lines(), PRODUCT_LIMIT))


def _parse(
    data: Mapping[str, Any],
    origin: str,
    lines: toml_text.Lines,
    limit: int,
    folder: Path = Path(),
) -> list[Placed]:
    """The specs of a parsed file, at most so many. folder: of the functions that it names.

    Raises: SpecError.
    """
    fields = [field.name for field in dataclasses.fields(AttentionSpec)]
    tables, reasons = tables_of(data, origin, lines, fields)
    if too_many := count_specs(tables, origin, limit):
        raise SpecError(at_most([*reasons, *too_many], origin))
    found: list[Placed] = []
    distinct = dict.fromkeys(reasons)
    for table, values in ((each, values) for each in tables for values in each.products()):
        try:
            named = without_functions(values, folder)
            found.append(Placed(from_data(AttentionSpec, named), table.place))
        except FunctionError as error:
            distinct[f"{table.place.of(error.field)}: {error}"] = None
        except DataError as error:
            distinct |= dict.fromkeys(_mistakes(error, values, table))
            if len(distinct) >= REASON_LIMIT:
                break
    distinct |= dict.fromkeys(_repeated_names(found, origin))
    if distinct:
        raise SpecError(at_most(distinct, origin))
    return found


def _repeated_names(placed: Iterable[Placed], origin: str) -> list[str]:
    """Reasons why names do not tell the specs of a file apart."""
    places: dict[str, list[Place]] = {}
    for each in placed:
        if each.spec.name:
            places.setdefault(each.spec.name, []).append(each.place)
    return [
        f"{found[1].at('name')}: several kernels are named {name!r}"
        for name, found in sorted(places.items())
        if len(found) > 1
    ]


def checked(spec: object) -> AttentionSpec:
    """A spec made in Python, whose fields have the types that those of a file have.

    Raises: SpecError with every field of a wrong type.
    """
    if not isinstance(spec, AttentionSpec):
        raise SpecError(f"{spec!r} is no AttentionSpec; attngen.load_specs reads those of a file")
    fields = to_data(spec)
    try:
        return from_data(AttentionSpec, fields)
    except DataError as error:
        reasons = "; ".join(dict.fromkeys(sorted(error.reasons.values())))
        raise SpecError(f"{spec.title}: {reasons}{_advice(fields)}") from error


def _mistakes(error: DataError, fields: Mapping[str, Any], table: Table) -> Iterator[str]:
    """Reasons against the fields of a table, each with its line."""
    for name, reason in sorted(error.reasons.items()):
        if name not in table.refused:
            yield f"{table.place.of(name)}: {reason}{_advice({name: fields.get(name, False)})}"


def _advice(fields: Mapping[str, Any]) -> str:
    """Advice for fields that hold the value of a feature that is only switched on."""
    given = [
        field.name
        for field in dataclasses.fields(AttentionSpec)
        if isinstance(field.default, bool) and type(fields.get(field.name, False)) is not bool
        if not (field.name == "score_mod" and isinstance(fields[field.name], str))
    ]
    if not given:
        return ""
    return f"; {', '.join(given)} = true switches it on, and each call gives the value"
