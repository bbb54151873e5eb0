"""PyTorch's own operations of attention on attngen's kernels: `register_flash`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import attention, attention_backward
from ...call.backend import AUTO, asked, check_backend
from ...errors import LimitError, SpecError
from .lengths import packed, paged

log = logging.getLogger("attngen")
NAME = "attngen"
ROWS_OF_LSE = 32  # of which those of the efficient operation are multiples
Results = tuple[Any, ...]
_said: set[str] = set()


def register_flash(backend: str = "auto") -> None:
    """Have PyTorch's flash and efficient attention on CUDA be attngen's, for the whole process.

    It registers `attngen` among PyTorch's implementations of flash attention and activates it:
    `scaled_dot_product_attention`, with gradients and in compiled code, `varlen_attn` and whatever
    else calls the operations launch attngen's kernels where PyTorch would choose flash, or the
    efficient one, which it takes for masks, biases and head dims of V of their own.
    `torch.nn.attention.restore_flash_attention_impl()` takes it back.

    backend: auto is what `attngen.set_backend` has chosen, else leaves calls that kernels do not
        serve, with dropout among them, to PyTorch's own operations, with the reason logged once;
        cuda refuses them; reference computes all but dropout by the definition.

    Raises: SpecError where there is no backend of that name; ImportError where this PyTorch, before
        2.11, has no such registry; RuntimeError where it is built without CUDA.
    """
    check_backend(backend)
    from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl

    register_flash_attention_impl(NAME, register_fn=partial(override, backend))
    activate_flash_attention_impl(NAME)


@dataclass
class Handle:
    """Operations that are replaced, until it is removed."""

    library: torch.library.Library | None

    def remove(self) -> None:
        """Let the operations be PyTorch's own."""
        if self.library is not None:
            self.library._destroy()
        self.library = None


def override(backend: str, key: str = "CUDA") -> Handle:
    """Replace the operations of a dispatch key. backend: as of `register_flash`."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in OPERATIONS.items():
        own = torch.library.get_kernel(f"aten::{name}", key)
        replaced = partial(_call, function, own, backend)
        library.impl(name, replaced, key, with_keyset=True)
    return Handle(library)


def _call(
    function: Callable[..., Results],
    own: Any,
    backend: str,
    keys: Any,
    *given: Any,
    **named: Any,
) -> Results:
    """The results of an operation. own: PyTorch's, for calls that kernels do not serve."""
    chosen = asked(backend)
    try:
        with torch.no_grad():
            return function(*given, **named, backend="cuda" if chosen == AUTO else chosen)
    except (SpecError, LimitError) as refusal:
        if chosen != AUTO:
            raise
        reason = "; ".join(refusal.reasons)
    if reason not in _said:
        _said.add(reason)
        log.warning("PyTorch computes an attention that it was replaced in: %s", reason)
    found: Results = own.call_boxed(keys, *given, **named)
    return found


def _refuse(dropout_p: float, debug: bool = False) -> None:
    """Raises: SpecError where a call asks for bits of PyTorch's kernels."""
    if dropout_p > 0:
        raise SpecError("dropout's bits are PyTorch's own in its operations")
    if debug:
        raise SpecError("return_debug_mask asks for what PyTorch's own kernels leave")


def _attend(operands: Sequence[Tensor], given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output and the LSE of a call."""
    found: Any = attention(*operands, **given, return_lse=True)
    out, aux = found
    return out, aux.lse


def _nothing(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of a generator that is not asked for, and no debug mask."""
    state = query.new_empty(2, dtype=torch.uint64)
    return state, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


# ---- flash attention


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    backend: str,
) -> Results:
    """`_scaled_dot_product_flash_attention` of [b, h, s, d]."""
    _refuse(dropout_p, return_debug_mask)
    given = _dense(is_causal, scale, backend)
    out, lse = _attend((query, key, value), given)
    return out, lse, None, None, query.shape[2], key.shape[2], *_nothing(query)


def _dense(is_causal: bool, scale: float | None, backend: str) -> dict[str, Any]:
    """Arguments of dense operands, whose results lie in memory as they do."""
    mask = {"mask": "causal", "bottom_right": True} if is_causal else {}
    layout = {"layout": "bhsd", "out_layout": "like_q"}
    return {**layout, **mask, "softmax_scale": scale, "backend": backend}


def flash_backward(*given: Any, scale: float | None = None, backend: str) -> Results:
    """`_scaled_dot_product_flash_attention_backward`; given: grad_out, query, key, value, out,
    logsumexp, lengths, which dense operands have not, dropout_p, is_causal and a generator's state.
    """
    (*tensors, _, _, _, _, dropout_p, is_causal, _, _) = given
    _refuse(dropout_p)
    found = attention_backward(*tensors, **_dense(is_causal, scale, backend))
    return found.dq, found.dk, found.dv


def packed_flash(
    query: Tensor, key: Tensor, value: Tensor, *given: Any, backend: str, **named: Any
) -> Results:
    """`_flash_attention_forward`, of [b, s, h, d] or of packed tokens [t, h, d]; given: cumulative
    lengths of both sides, longest ones, dropout_p, is_causal, return_debug_mask."""
    ends_q, ends_k, _, _, dropout_p, is_causal, debug = given
    _refuse(dropout_p, debug)
    arguments = _lengths(ends_q, ends_k, named) | _window(is_causal, named)
    out, lse = _attend((query, key, value), arguments | {"backend": backend})
    return out, lse, *_nothing(query)


def _lengths(ends_q: Any, ends_k: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Arguments that say where sequences lie, of an operation's."""
    used, table = named.get("seqused_k"), named.get("block_table")
    others = {"alibi_slopes": named.get("alibi_slopes"), "num_splits": named.get("num_splits")}
    if ends_q is None:
        if table is not None:
            raise SpecError("pages of dense queries are PyTorch's own")
        return {"layout": "bshd", "out_layout": "like_q", "seqused_kv": used, **others}
    of_keys = {} if table is not None else packed("kv", ends_k, used)
    return paged(table, used) | packed("q", ends_q, None) | of_keys | others


def _window(is_causal: bool, named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the mask and of the scale: the last query's own is the last key."""
    left, right = (named.get(f"window_size_{side}") for side in ("left", "right"))
    sides = -1 if left is None else left, 0 if is_causal else -1 if right is None else right
    return {"window": sides, "bottom_right": True, "softmax_scale": named.get("scale")}


def packed_flash_backward(*given: Any, backend: str, **named: Any) -> Results:
    """`_flash_attention_backward`; given: grad_out, query, key, value, out, logsumexp, cumulative
    and longest lengths of both sides, dropout_p, is_causal, and a generator's state."""
    (*tensors, ends_q, ends_k, _, _, dropout_p, is_causal, _, _) = given
    _refuse(dropout_p)
    arguments = _lengths(ends_q, ends_k, named) | _window(is_causal, named)
    found = attention_backward(*tensors, **arguments, out_layout="like_q", backend=backend)
    return found.dq, found.dk, found.dv


# ---- the efficient operation, of masks and of head dims of V of their own


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    *given: Any,
    scale: float | None = None,
    backend: str,
) -> Results:
    """`_scaled_dot_product_efficient_attention` of [b, h, s, d], whose output lies in memory as
    [b, s, h, d], and whose LSE has a multiple of `ROWS_OF_LSE` rows; given: whether the LSE is
    wanted, then, if not left out, dropout_p and is_causal."""
    compute_log_sumexp, *others = given
    defaults: list[Any] = [0.0, False]
    dropout_p, is_causal = [*others, *defaults[len(others) :]]
    _refuse(dropout_p)
    operands = [x.transpose(1, 2) for x in (query, key, value)]
    out, lse = _attend(operands, _biased(attn_bias, is_causal, scale, backend))
    rows = query.shape[2]
    room = math.ceil(rows / ROWS_OF_LSE) * ROWS_OF_LSE
    lse = pad(lse, (0, room - rows), value=math.inf) if compute_log_sumexp else lse[..., :0]
    state = query.new_empty(2, dtype=torch.int64)
    return out.transpose(1, 2), lse, *state.unbind()


def _biased(
    bias: Tensor | None, is_causal: bool, scale: float | None, backend: str
) -> dict[str, Any]:
    """Arguments of dense operands [b, s, h, d]: the first query sees the first key."""
    mask = "causal" if is_causal else "none"
    return {"mask": mask, "bias": bias, "softmax_scale": scale, "backend": backend}


def efficient_backward(
    grad_out: Tensor | None, *given: Any, scale: float | None = None, backend: str
) -> Results:
    """`_scaled_dot_product_efficient_attention_backward`; given: query, key, value, attn_bias, out,
    logsumexp, a generator's state, dropout_p, which gradients are wanted, and is_causal, which may
    be left out."""
    query, key, value, attn_bias, out, logsumexp, _, _, dropout_p, wanted, *rest = given
    _refuse(dropout_p)
    (is_causal,) = rest or (False,)
    rows = query.shape[2]
    if grad_out is None:
        return None, None, None, None
    d_out, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    arguments = _biased(attn_bias, is_causal, scale, backend)
    lse = logsumexp[..., :rows].contiguous()
    found = attention_backward(d_out, q, k, v, o, lse, **arguments)
    carriers = [x.transpose(1, 2) for x in (found.dq, found.dk, found.dv) if x is not None]
    *_, of_bias = wanted
    return *carriers, found.dbias if of_bias else None


OPERATIONS: dict[str, Callable[..., Results]] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_flash_attention_forward": packed_flash,
    "_flash_attention_backward": packed_flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
"""Functions of PyTorch's operations, by their names."""
