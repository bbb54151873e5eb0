"""`attngen.attention`: one call for every variant, on the kernels or on the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ... import reference
from ...call.table import INPUTS, LENGTHS, OPTIONAL, AttentionCall, MaskMod, ScoreMod, Window, named
from ...errors import LimitError, SpecError
from ...reference.dropout import draw_rng_state
from ...reference.type_checks import type_violations
from ...results import AttentionAux
from ...spec.plain import differing
from . import call_cache as recent
from . import nested, on_reference
from . import routing as choice
from .arguments import Settled, arguments_of, default_slopes_of
from .autograd import Trained
from .casts import autocast, cast, casts_of
from .checks import check_rest, refuse_derivatives, refuse_unreadable, traced_refusal
from .forward import dispatched, find_alone, find_ready, with_readable_bias
from .lengths import settle as settle_lengths
from .lengths import unread
from .operation import format_of, run, unobserved
from .schedule import Schedule, ordered_by
from .sharding import is_distributed, over_shards
from .signature import Call, places_of
from .torch_private import levels
from .transforms import is_transformed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import Options


# What type checkers see: a tensor, or a pair where a by-product is asked for; either where that
# depends on a value.
@overload
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    return_amax: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_max_logit: bool = False,
    return_amax: bool = False,
    dropout_p: float = 0.0,
    **options: Unpack[Options],
) -> tuple[Tensor, AttentionAux]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: bool = False,
    return_max_logit: Literal[True],
    return_amax: bool = False,
    dropout_p: float = 0.0,
    **options: Unpack[Options],
) -> tuple[Tensor, AttentionAux]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_amax: Literal[True],
    dropout_p: float = 0.0,
    **options: Unpack[Options],
) -> tuple[Tensor, AttentionAux]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_amax: bool = False,
    dropout_p: float = 0.0,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, AttentionAux]: ...
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    layout: str = "bshd",
    mask: str | None = "none",
    window: Window = (-1, -1),
    bottom_right: bool | None = None,
    attn_mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    bias_type: str = "post_scale",
    alibi_slopes: Tensor | bool | None = None,
    softmax: str = "vanilla",
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_kv: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    page_table: Tensor | tuple[Tensor, Tensor] | None = None,
    num_splits: int | None = None,
    schedule: Schedule | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    scale_s: Tensor | None = None,
    descale_s: Tensor | None = None,
    scale_o: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_amax: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, AttentionAux]:
    """Scaled dot-product attention with any of attngen's masks, scores, softmaxes and layouts.

    q, k, v: tensors in `layout`, by default [b, s_q, h_q, d], [b, s_kv, h_kv, d] and
    [b, s_kv, h_kv, d_v]; h_q a multiple of h_kv. mask: none, causal, padding, padding_causal (the
    causal ones also with _bottom_right behind them) or arbitrary; attn_mask: bool, a broadcast of
    [b, h_q, s_q, s_kv], True takes part. window: keys visible before and after the diagonal, −1
    unbounded. softmax_scale defaults to 1/√d; softcap: 0 none. bias: of q's dtype, a broadcast as
    attn_mask, with bias_type post_scale or pre_scale; alibi_slopes: float32 [h_q] or [b, h_q], or
    True. softmax: vanilla, off_by_one, or learnable with sink, float32 [h_q]. Other floats of 16 to
    64 bits are cast, saturating, with their gradient. None is no mask, window or softcap, numbers
    may be NumPy's. rng_state: int64 [2], drawn where dropout_p is above 0 and none is given.
    cu_seqlens_*: int32 or int64 [b + 1], seqused_*: [b], on the device, never waited for;
    max_seqlen_*, numbers or tensors of one, change nothing. A nested (jagged) [b, j, h, d] says
    them itself where the layout has tokens (thd); the output of a nested q is nested.
    Of a paged layout k and v are pages that page_table names; num_splits: parts in which each
    sequence's keys are read, 1 to 128, None for as many as fill the chip. What each argument means
    is in docs/guide/semantics.md. schedule: shared by calls of equal lengths, which are ordered
    once.

    FP8 (float8_e4m3fn, float8_e5m2) q, k and v take scales, float32 [1] on their device, which is
    never waited for: descale_q, descale_k and descale_v (or [b, h_kv]) give what a stored number
    stands for; scale_s and its reciprocal descale_s store the softmax's weights; scale_o stores
    the output, where out_dtype is FP8 too (default: bfloat16). Beside 16 bits out_dtype may be
    torch.float32, for parts that `merge_states` joins; kernels have no gradient of that.

    Gradients flow to q, k, v, bias and sink from the output and the LSE (16 bits; kernels refuse
    second and forward-mode derivatives). deterministic: whether they have the same bits on every
    run, on GPUs with as many multiprocessors; None asks
    torch.are_deterministic_algorithms_enabled(). Under torch.autocast float32 operands are cast to
    its dtype.

    backend: `cuda` runs a compiled kernel or refuses; `reference` is the definition in plain
    PyTorch, on any device; `auto` takes the reference where kernels refuse a call (the device, the
    variant, a gradient, operands off multiples of 16 bytes), and logs the reason once.

    Returns the output in Q's format, with V's head dim and Q's dtype (FP8: out_dtype), or (output,
    AttentionAux) where `return_lse`, `return_max_logit`, `return_amax` or dropout asks for
    by-products.
    Raises: SpecError with every violation at once; CompileError, LaunchError; CacheError where
    ATTNGEN_DISABLE_JIT is set and no kernel is found, BundleError where a bundle is damaged.
    """
    try:  # which costs a call less than to ask for types
        nesting = (
            dict(locals())
            if q.is_nested or (k is not None and k.is_nested) or (v is not None and v.is_nested)
            else None
        )
    except (AttributeError, ValueError) as error:
        raise SpecError(type_violations({"q": q, "k": k, "v": v})) from error
    if nesting is not None:
        return nested.attend(attention, nesting)  # type: ignore[no-any-return]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    plain: recent.Call | None = None
    if (
        (cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None)
        and (attn_mask is None and bias is None and alibi_slopes is None and sink is None)
        and (descale_q is None and descale_k is None and descale_v is None and rng_state is None)
        and (scale_s is None and descale_s is None and scale_o is None and dropout_p == 0)
        and (score_mod is None and mask_mod is None and block_mask is None and schedule is None)
        and not (return_lse or return_max_logit or return_amax or k is None or v is None)
        and (page_table is None or isinstance(page_table, Tensor))
        and (type(window) is tuple or window is None)
        and not (choice.CHECK_VALUES or torch.compiler.is_compiling())
    ):
        tensors = (q, k, v, page_table, seqused_kv, seqused_q, cu_seqlens_q, cu_seqlens_kv)
        plain = (
            (
                page_table is None, seqused_kv is None, seqused_q is None, cu_seqlens_q is None,
                cu_seqlens_kv is None, layout, mask, window, bottom_right, softmax_scale, softcap,
                bias_type, softmax, deterministic, max_seqlen_q, max_seqlen_kv, backend, out_dtype,
                num_splits, torch.is_grad_enabled(),
            ),
            [x for x in tensors if x is not None],
        )  # fmt: skip
        try:
            output = recent.serve(*plain)
        except (SpecError, LimitError):  # of where operands begin: met again below
            output = None
        if output is not None:
            return output
    if (max_seqlen_q is not None or max_seqlen_kv is not None) and not choice.CHECK_VALUES:
        max_seqlen_q, max_seqlen_kv = unread(max_seqlen_q), unread(max_seqlen_kv)
        if plain is not None and any([isinstance(x, Tensor) for x in plain[0]]):
            plain = tuple(map(unread, plain[0])), plain[1]
            if (output := recent.serve(*plain)) is not None:
                return output
    wants_aux = return_lse or return_max_logit or return_amax or dropout_p != 0
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # which knows no meta tensors
        q, k, v = autocast(q, k, v)
    dense = (cu_seqlens_q is None and cu_seqlens_kv is None and seqused_q is None) and (
        seqused_kv is None and cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None
    )
    bare = (
        (descale_q is None and descale_k is None and descale_v is None and scale_s is None)
        and (descale_s is None and scale_o is None and dense and page_table is None)
        and (alibi_slopes is None and sink is None and rng_state is None)
        and (attn_mask is None and bias is None and schedule is None)
    )
    # What the checks of a call depend on; None where they must run again.
    key: tuple[Any, ...] | None = None
    refusal: SpecError | LimitError | None = None
    if (
        (score_mod is None and mask_mod is None and block_mask is None)
        and (type(window) is tuple or window is None)
        and not (choice.CHECK_VALUES or torch.compiler.is_compiling())
    ):
        try:
            key = (
                q.shape, q.stride(), q.dtype, q.device,
                None if k is None else (k.shape, k.stride(), k.dtype, k.device),
                None if v is None else (v.shape, v.stride(), v.dtype, v.device),
                layout, mask, window, bottom_right, softmax_scale, softcap, bias_type, softmax,
                dropout_p, deterministic, return_max_logit, max_seqlen_q, max_seqlen_kv, backend,
                out_dtype, return_amax, num_splits,
            )  # fmt: skip
            known = _settled.get(key) if bare else None
        except _UNKEYED:
            key = known = None
        if known is not None:
            try:
                return _run_kernels((q, k, v, *_NO_OTHERS), known, wants_aux, plain)
            except (SpecError, LimitError) as error:
                refusal = error
    scales = (descale_q, descale_k, descale_v, scale_s, descale_s, scale_o)
    lengths: tuple[Tensor | None, ...] = (
        *(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
        *(seqused_q, seqused_kv),
    )
    paired = isinstance(page_table, (tuple, list))
    tables = tuple(page_table) if paired else (page_table, page_table)  # type: ignore[arg-type]
    slopes = alibi_slopes if isinstance(alibi_slopes, Tensor) else None
    scored = (slopes, sink, rng_state, attn_mask, bias)
    if key is not None and not bare:
        try:
            key += (
                *[None if x is None else format_of(x) for x in (*scales, *lengths, *scored)],
                tuple(map(format_of, tables)) if paired else format_of(page_table),
                (alibi_slopes is True, type(alibi_slopes)),
                schedule is None or is_transformed(),  # which has none either
            )
            known = _settled.get(key)
        except _UNKEYED:
            key = known = None
        if known is not None:
            given = lengths
            if not (dense or known.lengths_as_given):
                lengths = settle_lengths(layout, lengths)
            operands = (q, k, v, *scales, *lengths, *tables, *scored, None)
            if known.casts:
                operands, plain = cast(operands, known.casts), None
            if schedule is not None:
                operands = _ordered(operands, known, schedule, given)
            plain = plain if dense or known.lengths_as_given else None
            try:
                return _run_kernels(operands, known, wants_aux, plain)
            except (SpecError, LimitError) as error:
                refusal = error
    given_by_name: dict[str, Any] = dict(
        q=q, k=k, v=v, layout=layout, mask=mask, window=window, bottom_right=bottom_right,
        attn_mask=attn_mask, softmax_scale=softmax_scale, softcap=softcap, bias=bias,
        bias_type=bias_type, alibi_slopes=alibi_slopes, softmax=softmax, sink=sink,
        dropout_p=dropout_p, rng_state=rng_state, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv, seqused_q=seqused_q, seqused_kv=seqused_kv,
        page_table=page_table, score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask,
        descale_q=descale_q, descale_k=descale_k, descale_v=descale_v, scale_s=scale_s,
        descale_s=descale_s, scale_o=scale_o, out_dtype=out_dtype, return_lse=return_lse,
        return_max_logit=return_max_logit, return_amax=return_amax,
    )  # fmt: skip
    call = AttentionCall(**given_by_name)
    rest = {"num_splits": num_splits, "deterministic": deterministic, "schedule": schedule}
    return _attend_anew(call, {**rest, "backend": backend}, key, refusal)


def _attend_anew(
    call: AttentionCall,
    rest: dict[str, Any],
    key: tuple[Any, ...] | None,
    refusal: SpecError | LimitError | None,
) -> Tensor | tuple[Tensor, AttentionAux]:
    """`attention` of a call like none before, whose arguments are checked; `rest` are those that
    the reference does without. key: what later calls like it have in common; refusal: of kernels
    that were to serve it."""
    plainly, changed = reference.converted(call), differing(rest)
    if changed or plainly is not call:
        return attention(**{**named(plainly), **rest, **changed})  # type: ignore[no-any-return]
    check_rest(rest["num_splits"], rest["deterministic"], rest["schedule"])
    wants_aux = call.return_lse or call.return_max_logit or call.return_amax or call.dropout_p != 0
    schedule, backend = rest["schedule"], rest["backend"]
    if refusal is None and choice.use_kernels(call, backend, rest["num_splits"]):
        arguments = arguments_of(call, rest["deterministic"], rest["num_splits"])
        settled = Settled(arguments, default_slopes_of(call))
        given = tuple(getattr(call, name) for name in LENGTHS)
        lengths = settle_lengths(call.layout, given)
        settled.lengths_as_given = all(a is b for a, b in zip(given, lengths, strict=True))
        slopes = call.alibi_slopes if isinstance(call.alibi_slopes, Tensor) else None
        scored = (slopes, call.sink, call.rng_state, call.attn_mask, call.bias)
        tables = call.page_tables or (None, None)
        operands = (call.q, call.k, call.v, *call.scales.values(), *lengths, *tables, *scored, None)
        settled.casts = casts_of(operands)
        operands = cast(operands, settled.casts)
        numbers = (call.softmax_scale, call.softcap, call.dropout_p)
        if key is not None and not any(isinstance(x, Tensor) for x in numbers):  # which may change
            if len(_settled) >= _KEY_LIMIT:
                _settled.clear()
            _settled[key] = settled
        if schedule is not None:
            operands = _ordered(operands, settled, schedule, given)
        if torch.compiler.is_compiling():
            refusal = traced_refusal(operands, settled.arguments, backend)
            if refusal is None:
                return _run_kernels(operands, settled, wants_aux)
        else:
            try:
                return _run_kernels(operands, settled, wants_aux)
            except (SpecError, LimitError) as error:
                refusal = error
    if refusal is not None:
        choice.leave_kernels(refusal, backend)
    deterministic = rest["deterministic"]
    out, aux = on_reference.run(
        call, lambda: arguments_of(call, deterministic, 0), choice.CHECK_VALUES
    )
    return (out, aux) if wants_aux else out


_KEY_LIMIT = 4096
# Raised by arguments without a hash, and by tensors without sizes: their checks say what they need.
_UNKEYED = (TypeError, RuntimeError, ValueError)
_settled: dict[tuple[Any, ...], Settled] = {}


_NO_OTHERS = (None,) * len(OPTIONAL)
RNG_STATE, ALIBI_SLOPES, SCHEDULE = map(INPUTS.index, ("rng_state", "alibi_slopes", "schedule"))


def _with(operands: tuple[Any, ...], place: int, tensor: Tensor) -> tuple[Any, ...]:
    return (*operands[:place], tensor, *operands[place + 1 :])


_slopes: dict[tuple[int, torch.device], Tensor] = {}  # for ever, since graphs may read them


def _slopes_of(heads: int, q: Tensor) -> Tensor:
    """ALiBi's own slopes, there for every stream. What a graph makes is not there before its
    replay: it keeps its own."""
    known = unobserved((q,))  # else heads may be a symbol
    if known and (slopes := _slopes.get((heads, q.device))) is not None:
        return slopes
    with torch.inference_mode(False):  # a call that trains may save them
        slopes = reference.default_alibi_slopes(heads, q.device)
    if known and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        if q.is_cuda:  # later calls may be on other streams
            torch.cuda.current_stream(q.device).synchronize()
        _slopes[heads, q.device] = slopes
    return slopes


def _ordered(
    operands: tuple[Any, ...],
    settled: Settled,
    schedule: Schedule,
    given: tuple[Tensor | None, ...],
) -> tuple[Any, ...]:
    """The operands with the schedule's, where kernels need one. given: the lengths of the call."""
    if settled.ordered is None:
        settled.ordered = ordered_by(operands, settled.arguments)
    table = schedule.table_of(settled.ordered, given, operands[0].device)
    return _with(operands, SCHEDULE, table) if table is not None else operands


def _train(
    operands: tuple[Tensor | None, ...],
    present: list[Any],
    settled: Settled,
    wants_aux: bool,
    plain: recent.Call | None,
) -> Sequence[Tensor]:
    """The results of a call that has gradients. present: the operands that there are."""
    trained = settled.trained_all if wants_aux else settled.trained
    if trained is None:
        ready = find_ready(with_readable_bias(operands), settled.arguments)
        assert settled.places is not None
        trained = Trained.of(Call(settled.arguments, settled.places), ready, wants_aux)
        if wants_aux:
            settled.trained_all = trained
        else:
            settled.trained = trained
    if plain is not None and not wants_aux:
        recent.note(*plain, operands, trained.ready, trained)
    return trained(present)


def _run_kernels(
    operands: tuple[Tensor | None, ...],
    settled: Settled,
    wants_aux: bool,
    plain: recent.Call | None = None,
) -> Tensor | tuple[Tensor, AttentionAux]:
    """operands: q, k, v and then signature.OPTIONAL. plain: what a call is known by that is to be
    remembered."""
    q, rng_state = operands[0], operands[RNG_STATE]
    assert q is not None
    if settled.default_slopes:
        operands = _with(operands, ALIBI_SLOPES, _slopes_of(settled.default_slopes, q))
    if settled.arguments.dropout_p > 0:
        rng_state = draw_rng_state(q.device) if rng_state is None else rng_state.contiguous()
        operands = _with(operands, RNG_STATE, rng_state)
    if settled.places is None:
        settled.places = places_of(operands)
    present: list[Any] = [operands[place] for place in settled.places]
    differentiable = torch.is_grad_enabled() and any([x.requires_grad for x in present])
    if differentiable or levels._current_level >= 0:
        refuse_derivatives(operands, settled.arguments, differentiable)
    results: Sequence[Tensor]
    if torch.compiler.is_compiling() or not unobserved(present):
        refuse_unreadable(operands)
        attend = over_shards(dispatched) if is_distributed(operands) else dispatched
        results = attend(*operands, *settled.arguments)
    elif differentiable:
        results = _train(operands, present, settled, wants_aux, plain)
    else:
        ready = settled.ready_all if wants_aux else settled.ready
        operands = with_readable_bias(operands)
        if ready is None:
            if wants_aux:
                ready = settled.ready_all = find_ready(operands, settled.arguments)
            else:
                ready = find_alone(operands, settled.arguments)
                if not torch.cuda.is_current_stream_capturing():
                    settled.ready = ready
        if plain is not None and ready is settled.ready:
            recent.note(*plain, operands, ready)
        results = run(ready, operands)
    if not wants_aux:
        return results[0]
    asked = settled.arguments
    more = iter(x for x in results[2:] if x.numel())
    amax_s, amax_o = (next(more) if asked.amax else None for _ in range(2))
    max_logit = next(more, None) if asked.max_logit else None
    if asked.max_logit and max_logit is None:  # of no heads
        max_logit = results[1].new_empty(0)
    return results[0], AttentionAux(
        lse=results[1], max_logit=max_logit, rng_state=rng_state, amax_s=amax_s, amax_o=amax_o
    )
