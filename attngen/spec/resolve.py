"""Resolve: from what the user says to the problems a kernel can be made for, or every reason
why not with the nearest spec that is legal."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import SpecError
from ..fragments.features import Features
from ..io.text import closest, suggestion
from ..targets.target import DEFAULT, TARGETS, names
from . import layouts
from .attention_spec import DTYPES_8BIT, DTYPES_16BIT, MAX_HEAD_DIM, AttentionSpec, dtype_name
from .fragment_checks import (
    called_fragments,
    check_continues,
    check_fragments,
    check_positions,
    scores_of,
    switched,
)
from .head_dims import check_head_dims, head_dim_step
from .mask_checks import (
    as_booleans,
    check_made,
    check_traced_mask,
    iteration_of,
    named_mask_mod,
    spec_of_mask,
)
from .masks import masks_of, without_arbitrary
from .mixed import MIXED, check_mixed
from .problem import BIASED_HEAD_DIM, LISTED, Direction, Problem, Sequence
from .scaling import check_scaling
from .tables import Place
from .violations import Violation

DIRECTIONS = ("fwd", "bwd", "append", "cast", "bwd_cast", "mask")
FORWARD_ALONE = ("fwd", "append", "cast", "bwd_cast", "mask")  # of specs without a backward
DTYPES = (*DTYPES_16BIT, *DTYPES_8BIT)
# Of a backward in 8 bits.
DEFAULT_GRAD_DTYPE, DEFAULT_D_O_DTYPE = "bf16", "e5m2"
_NO_SPLITS = (
    "kernels that split keys have none of it; without num_splits, up to head dim "
    f"{MAX_HEAD_DIM}, others serve the call"
)
SWITCHES = ("score_mod", "mask_mod")  # fields of a spec that ask for functions: no kernels yet
BIASES = ("pre_scale", "post_scale")


def resolve(
    spec: AttentionSpec, features: Features, place: Place | None = None
) -> tuple[Problem, ...]:
    """The problem of each direction of the spec: two of a backward under windows, which may be
    narrow or wide (`Problem.orders`). place: the table that it is from.

    Raises: SpecError with every violation, the line that it is at, and the nearest legal spec.
    """
    violations = find_violations(spec, features)
    if violations:
        changes = ", ".join(dict.fromkeys(f"{v.field}={v.nearest!r}" for v in violations))
        reasons = [f"{_at(place, v.field)}{spec.title}: {v.reason}" for v in violations]
        raise SpecError([*reasons, f"nearest legal spec: the same with {changes}"])
    masks, made = masks_of(spec.mask), isinstance(spec.mask_mod, str)
    digests = [each.digest for each in called_fragments(spec, features)]
    q_seq, kv_seq = sequences_of(spec)
    forward = Problem(
        direction="fwd",
        dtype_q=spec.dtype,  # type: ignore[arg-type]  # checked above
        dtype_kv=spec.kv_dtype or spec.dtype,  # type: ignore[arg-type]
        dtype_o=spec.out_dtype or default_out_dtype(spec.dtype),  # type: ignore[arg-type]
        head_dim_qk=_tile_dim(spec, spec.head_dim),
        head_dim_v=_tile_dim(spec, spec.head_dim_v or spec.head_dim),
        masks=(*masks.fragments, *(each.name for each in switched(spec, features, "mask"))),
        scores=scores_of(spec, features),
        softmax=spec.softmax,
        q_seq=q_seq,
        kv_seq=kv_seq,
        kv_fetch=fetch_of(spec),
        kv_iter=iteration_of(spec) if made else "range",
        max_logit=spec.return_max_logit,
        dropout=spec.dropout,
        positions=spec.positions,
        continues=spec.continues,
        attn_mask=spec.attn_mask or masks.arbitrary or made,
        decode=spec.decode,
        fragment_digests=tuple(each for each in digests if each is not None),
    )
    found: dict[str, tuple[Problem, ...]] = {"fwd": (forward,)}  # others where they are asked for
    if "bwd" in spec.directions:
        found["bwd"] = backward_of(spec, forward).orders()
    if "append" in spec.directions:
        found["append"] = (forward.append(spec.head_dim, spec.head_dim_v or spec.head_dim),)
    if "mask" in spec.directions:
        found["mask"] = (forward.mask(),)
    casts: tuple[Direction, ...] = ("cast", "bwd_cast")
    found |= {each: (forward.cast(each),) for each in casts if each in spec.directions}
    problems = tuple(problem for direction in spec.directions for problem in found[direction])
    if isinstance(spec.mask_mod, str) and spec.mask_mod != LISTED:  # its own mask, made before
        problems += resolve(spec_of_mask(spec.mask_mod), features)
    return problems


def backward_of(spec: AttentionSpec, forward: Problem) -> Problem:
    """The backward of a spec's forward."""
    backward = forward.backward(spec.deterministic)
    if not forward.eight_bit:
        wide = spec.grad_dtype == "fp32"
        return dataclasses.replace(backward, dtype_grad="fp32") if wide else backward
    d_o, grad = spec.d_o_dtype or DEFAULT_D_O_DTYPE, spec.grad_dtype or DEFAULT_GRAD_DTYPE
    return dataclasses.replace(
        backward,
        dtype_d_o=d_o,  # type: ignore[arg-type]  # checked with the spec
        dtype_grad=grad,  # type: ignore[arg-type]
        mixed=spec.backward == MIXED,
    )


def _at(place: Place | None, field: str) -> str:
    return f"{place.at(field)}: " if place else ""


def nearest(spec: AttentionSpec, features: Features) -> AttentionSpec:
    """The spec with each violated field replaced by the nearest legal value."""
    changes = {v.field: v.nearest for v in find_violations(spec, features)}
    return dataclasses.replace(spec, **changes)


def sequences_of(spec: AttentionSpec) -> tuple[Sequence, Sequence]:
    """The fragments that find the sequences of Q, and of K and V."""
    dense: Sequence = "used" if spec.seqused or masks_of(spec.mask).padding else "dense"
    axes = layouts.parse(spec.layout)
    dense = "used" if axes.paged else dense
    return (
        "packed" if axes.q_format == "thd" else dense,
        "packed" if axes.kv_format == "thd" else dense,
    )


def fetch_of(spec: AttentionSpec) -> str:
    """The fragment that brings the operands."""
    if layouts.parse(spec.layout).paged:
        return "page_tma"
    return "gather" if spec.gathers else "tma"


def _tile_dim(spec: AttentionSpec, dim: int) -> int:
    """A head dim of a problem: where threads copy rows, one kernel serves all of a step of 16."""
    return -(-dim // 16) * 16 if spec.gathers else dim


def default_out_dtype(dtype: str) -> str:
    """The output's dtype where none was asked for: Q's, and bf16 of 8-bit Q."""
    return "bf16" if dtype in DTYPES_8BIT else dtype


def find_violations(spec: AttentionSpec, features: Features) -> list[Violation]:
    """Every field of the spec for which no kernel can be made. Of a layout that there is not the
    rest is judged as it will be with the nearest."""
    found = _check_layout(spec)
    if found:
        spec = dataclasses.replace(spec, layout=found[0].nearest)
    is_made, found = isinstance(spec.mask_mod, str), found + check_made(spec, features)
    found += check_traced_mask(spec)
    spec = as_booleans(spec) if is_made else spec
    found += [
        *_check_operands(spec),
        *_check_features(spec, features),
        *_check_together(spec),
        *(check_positions(spec) if spec.positions else ()),
        *(check_continues(spec) if spec.continues else ()),
        *_check_directions(spec),
        *check_mixed(spec),
        *check_scaling(spec),
    ]
    found += _check_targets(spec)
    return [named_mask_mod(each) if is_made else each for each in found]


def _check_targets(spec: AttentionSpec) -> list[Violation]:
    """Architectures that there are no kernels for, and what those lack that the spec asks for."""
    known = names()
    reasons: dict[str, str] = {}
    for arch in spec.arch:
        target = TARGETS.get(arch)
        if target is None:
            reason = f"architecture {arch!r} has no kernels; available: {known}"
            reasons[arch] = reason + suggestion(arch, known)
        elif spec.dtype in DTYPES_8BIT and not target.fp8:
            reasons[arch] = f"dtype {spec.dtype!r}: tensor cores of {arch} multiply no FP8"
    legal = tuple(arch for arch in spec.arch if arch not in reasons) or (DEFAULT.name,)
    if not spec.arch:
        return [Violation("arch", f"arch is empty; available: {known}", legal)]
    return [Violation("arch", reason, legal) for reason in reasons.values()]


def _check_layout(spec: AttentionSpec) -> list[Violation]:
    try:
        layouts.parse(spec.layout)
    except ValueError as error:
        known = (*layouts.FORMATS, *layouts.NAMES)
        reason = f"{str(error).rstrip('.')}{suggestion(spec.layout, known)}"
        return [Violation("layout", reason, closest(spec.layout, known) or "bshd")]
    return []


def _check_operands(spec: AttentionSpec) -> list[Violation]:
    found: list[Violation] = []
    if spec.dtype not in DTYPES:
        reason = f"dtype {spec.dtype!r} has no kernels; available: {DTYPES}"
        reason += _dtype_suggestion(spec.dtype, DTYPES)
        found.append(Violation("dtype", reason, _nearest_dtype(spec.dtype)))
    dtype = spec.dtype if spec.dtype in DTYPES else "bf16"
    eight_bit = dtype in DTYPES_8BIT
    kv_dtypes = DTYPES_8BIT if eight_bit else (dtype, *DTYPES_8BIT)
    if spec.kv_dtype not in (None, *kv_dtypes):
        reason = f"kv_dtype {spec.kv_dtype!r}: allowed beside {dtype!r} queries are {kv_dtypes}"
        reason += _dtype_suggestion(spec.kv_dtype, kv_dtypes)
        found.append(Violation("kv_dtype", reason, None))
    out_dtypes = DTYPES if eight_bit else (dtype, "fp32")
    if spec.out_dtype not in (None, *out_dtypes):
        reason = f"out_dtype {spec.out_dtype!r}: allowed for {dtype!r} queries are {out_dtypes}"
        reason += _dtype_suggestion(spec.out_dtype, out_dtypes)
        found.append(Violation("out_dtype", reason, None))
    found += check_head_dims(spec, head_dim_step(spec, dtype))
    found += _check_gradients(spec, eight_bit)
    return found + _check_decode(spec) + _check_gather(spec) + _check_widened(spec)


def _check_gradients(spec: AttentionSpec, eight_bit: bool) -> list[Violation]:
    """Find dtypes that gradients do not have: any belongs to a backward in 8 bits, float32 to one
    in 16 whose gradients are parts of sums."""
    found = []
    known: dict[str, tuple[str, ...]] = {"grad_dtype": ("fp32",)}
    if eight_bit:
        known = {"grad_dtype": DTYPES, "d_o_dtype": DTYPES_8BIT}
    for field in ("grad_dtype", "d_o_dtype"):
        allowed = known.get(field, ())
        dtype = getattr(spec, field)
        if dtype in (None, *allowed):
            continue
        reason = f"{field} {dtype!r}: allowed for {spec.dtype!r} queries are {allowed}"
        if not allowed:
            reason = f"{field} {dtype!r}: output gradients of {spec.dtype!r} queries have theirs"
        found.append(Violation(field, reason + _dtype_suggestion(dtype, allowed), None))
    return found


def _nearest_dtype(name: str) -> str:
    """The dtype that another name may mean, such as PyTorch's."""
    meant = dtype_name(f"torch.{name.removeprefix('torch.')}")
    return meant if meant in DTYPES else "bf16"


def _dtype_suggestion(name: str | None, known: tuple[str, ...]) -> str:
    """A suggestion that knows PyTorch's names too."""
    if name is None:
        return ""
    meant = dtype_name(f"torch.{name.removeprefix('torch.')}")
    return f"; did you mean {meant!r}?" if meant in known else suggestion(name, known)


def _check_gather(spec: AttentionSpec) -> list[Violation]:
    """Violations of a spec that wants gathered what only the copy engine reads."""
    what = (
        f"{spec.dtype} operands" if spec.dtype in DTYPES_8BIT
        else "8-bit keys" if spec.widens
        else "pages" if layouts.parse(spec.layout).paged
        else "split keys" if spec.decode
        else ""
    )  # fmt: skip
    if not (spec.gather and what):
        return []
    reason = f"gather: {what} are read by the copy engine alone, at multiples of 16 bytes"
    return [Violation("gather", reason, False)]


def _check_widened(spec: AttentionSpec) -> list[Violation]:
    """Violations of a spec whose K and V have 8 bits beside a Q of 16."""
    if not spec.widens:
        return []
    found, layout = [], layouts.parse(spec.layout)
    if "q" in layout.packed_operands:
        reason = f"kv_dtype {spec.kv_dtype!r}: layout {spec.layout!r} has q, k and v in one tensor"
        found.append(Violation("kv_dtype", reason, None))
    beside = f"beside {spec.kv_dtype!r} keys and 16-bit queries has no kernels yet"
    asked: dict[str, Any] = {n: False for n in ("dropout", "attn_mask") if getattr(spec, n)}
    if spec.bias in BIASES:
        asked["bias"] = "none"
    if masks_of(spec.mask).arbitrary:
        asked["mask"] = without_arbitrary(spec.mask)
    return found + [Violation(name, f"{name} {beside}", value) for name, value in asked.items()]


def _check_decode(spec: AttentionSpec) -> list[Violation]:
    """Violations of a spec whose kernels split the keys, or read pages."""
    found, layout = [], layouts.parse(spec.layout)
    if not (spec.decode or layout.paged):
        return []
    eight_bit, out = spec.dtype in DTYPES_8BIT, spec.out_dtype
    legal: dict[str, str | None] = {}
    if eight_bit:
        legal["dtype"] = "bf16"
        drawn = spec.dropout or spec.attn_mask or masks_of(spec.mask).arbitrary
        beside = drawn or spec.bias in BIASES or "q" in layout.packed_operands
        if spec.kv_dtype in DTYPES_8BIT and beside:  # what widening kernels lack
            legal["kv_dtype"] = None
    if out == "fp32" or (eight_bit and out in DTYPES and out != "bf16"):
        legal["out_dtype"] = None
    for field, value in legal.items():
        what = "split" if spec.decode else "read from pages"
        reason = f"{field} {getattr(spec, field)!r}: keys are {what} for queries and an output of "
        reason += "one 16-bit dtype alone"
        found.append(Violation(field, reason, value))
    return found


def available_directions(spec: AttentionSpec) -> tuple[str, ...]:
    """The directions with kernels; a backward starts from a 16-bit output, as `attention` gives."""
    without = spec.widens or spec.out_dtype == "fp32"
    return FORWARD_ALONE if without else DIRECTIONS


def _check_directions(spec: AttentionSpec) -> list[Violation]:
    available = available_directions(spec)
    whose = f" for {spec.dtype!r} queries, {spec.kv_dtype or spec.dtype!r} keys and"
    whose += f" {spec.out_dtype or 'default'!r} output"
    if spec.decode or layouts.parse(spec.layout).paged:
        available, whose = FORWARD_ALONE, " that split keys or read pages"
    legal = tuple(each for each in spec.directions if each in available) or ("fwd",)
    if not spec.directions:
        return [Violation("directions", f"directions is empty; available: {available}", legal)]
    found = []
    for direction in (x for x in dict.fromkeys(spec.directions) if x not in available):
        reason = f"direction {direction!r} has no kernels{whose if direction in DIRECTIONS else ''}"
        reason += f"; available: {available}{suggestion(direction, available)}"
        found.append(Violation("directions", reason, legal))
    return found


def _check_together(spec: AttentionSpec) -> list[Violation]:
    """Features that kernels which split keys do not have: a block's scores are read and hidden a
    warpgroup's 64 queries of one head at a time, and these kernels have several heads in a tile."""
    if not spec.decode:
        return []
    switches = ("dropout", "attn_mask", "positions")
    asked: dict[str, Any] = {name: False for name in switches if getattr(spec, name)}
    if spec.bias in BIASES:
        asked["bias"] = "none"
    if masks_of(spec.mask).arbitrary:
        asked["mask"] = without_arbitrary(spec.mask)
    return [Violation(name, f"{name}: {_NO_SPLITS}", nearest) for name, nearest in asked.items()]


def _check_features(spec: AttentionSpec, features: Features) -> list[Violation]:
    found = check_fragments(spec, features)
    if spec.softmax not in features["softmax"]:
        reason = f"softmax {spec.softmax!r} is unknown; available: {[*features['softmax']]}"
        reason += suggestion(spec.softmax, features["softmax"])
        meant = closest(spec.softmax, features["softmax"]) or "vanilla"
        found.append(Violation("softmax", reason, meant))
    if spec.bias not in ("none", *BIASES):
        reason = f"bias {spec.bias!r} is unknown; available: {['none', *BIASES]}"
        reason += suggestion(spec.bias, ("none", *BIASES))
        found.append(Violation("bias", reason, "none"))
    if spec.dtype in DTYPES_8BIT:
        backward = "bwd" in spec.directions
        if spec.bias == "pre_scale":
            reason = f"bias 'pre_scale' joins products of stored {spec.dtype}: no kernels yet"
            found.append(Violation("bias", reason, "none" if backward else "post_scale"))
        largest = max(spec.head_dim, spec.head_dim_v or spec.head_dim)
        if spec.bias in BIASES and backward and largest > BIASED_HEAD_DIM:
            reason = f"bias: a backward of {spec.dtype} has one up to head dim {BIASED_HEAD_DIM}, "
            reason += "beyond which its 16 KiB a block are not free (225 of 227 at 256); "
            reason += f"got {largest}"
            found.append(Violation("bias", reason, "none"))
    for switch in SWITCHES:
        if getattr(spec, switch) is True:
            found.append(Violation(switch, f"{switch} has no kernels yet", False))
    return found
