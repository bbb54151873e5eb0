"""`attngen.attention`: one call for every variant, on the kernels or on the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ...call.backend import default
from ...call.recipe import in_force
from ...call.signatures import argument_list, signature
from ...call.table import ROWS
from ...errors import LimitError, SpecError
from ...results import AttentionAux
from . import eight_bits, into, routing
from .callables import compiled as callable_compiled
from .calls import Bound, bind, calls, route
from .torch_private import is_deterministic

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import Options


# What type checkers see: a tensor, or a pair where a by-product is asked for; either where a flag
# is no literal.
@overload
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    return_amax: Literal[False] = False,
    return_rng_state: Literal[False] = False,
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
    return_rng_state: bool = False,
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
    return_rng_state: bool = False,
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
    return_rng_state: bool = False,
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
    return_rng_state: Literal[True],
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
    return_rng_state: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, AttentionAux]: ...
def attention(
    q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **given: Any
) -> Tensor | tuple[Tensor, AttentionAux]:
    """Scaled dot-product attention with any of attngen's masks, scores, softmaxes and layouts.

    Gradients flow to q, k, v, bias and sink from the output and the LSE (16 bits; kernels refuse
    second and forward-mode derivatives). Under torch.autocast float32 operands are cast to its
    dtype. A nested (jagged) [b, j, h, d] says its lengths itself where the layout has tokens (thd);
    the output of a nested q is nested. FP8 (float8_e4m3fn, float8_e5m2) q, k and v take scales on
    their device, which are never waited for. Arguments may be NumPy's numbers; None is the default.
    docs/guide/semantics.md says what each argument means.

    Returns:
        The output in Q's format, with V's head dim and Q's dtype (FP8: out_dtype); or (output,
        AttentionAux) where return_lse, return_max_logit, return_amax or return_rng_state asks for
        by-products.

    Raises:
        SpecError: with every violation at once.
        CompileError, LaunchError: where a kernel cannot be made or launched.
        CacheError: where ATTNGEN_DISABLE_JIT is set and no kernel is found.
        BundleError: where a bundle is damaged.

    Args:
    """
    if given.get("out") is not None:
        return into.attend(attention, (q, k, v), given)
    if in_force.recipe is not None:
        eight = eight_bits.replaced(in_force.recipe, (q, k, v), given)
        if eight is not None:
            return eight_bits.run(attention, eight)
    if torch.compiler.is_compiling() or routing.CHECK_VALUES:
        return route(attention, (q, k, v), given, Bound(None, []), None)
    state = torch.is_grad_enabled(), is_deterministic(), default.backend  # as calls.state has it
    key, tensors = bind(state, q, k, v, given)
    refusal = None
    if (known := calls.find(key, tensors)) is not None:
        try:
            return known(tensors, given.get("schedule"))
        except (SpecError, LimitError) as error:
            refusal = error
    return route(attention, (q, k, v), given, Bound(key, tensors), refusal)


attention.__doc__ = f"{(attention.__doc__ or '').rstrip()}\n{argument_list(ROWS, indent=8)}\n    "
attention.__signature__ = signature(  # type: ignore[attr-defined]
    ROWS, "Tensor | tuple[Tensor, AttentionAux]"
)
callable_compiled.serve(attention)
