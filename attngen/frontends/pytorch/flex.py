"""`attngen.flex_attention`: the signature of PyTorch's `flex_attention`, on attngen's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...call.table import ScoreMod
from ...errors import SpecError
from .attention import attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

_HEADS = 1  # the axis


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    **options: Any,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` by `attngen.attention`.

    query: [b, h_q, s_q, d]; key, value: [b, h_kv, s_kv, d and d_v], of fewer heads with enable_gqa.
    kernel_options: of PyTorch's kernels, which say how and never what these compute: unread.
    options: further arguments of `attention`, such as dropout_p, window and backend.

    Returns the output [b, h_q, s_q, d_v]; with return_lse (output, LSE [b, h_q, s_q], float32,
    natural log); with return_aux (output, torch's AuxOutput).

    Raises: SpecError where key has fewer heads without enable_gqa, and of the maxima of rows, of
    which kernels have those of heads; as `attention`.
    """
    if not enable_gqa and query.shape[_HEADS] != key.shape[_HEADS]:
        raise SpecError(
            f"query has {query.shape[_HEADS]} heads and key {key.shape[_HEADS]}. Pass "
            "enable_gqa=True where groups of query heads share one."
        )
    if return_aux is not None and return_aux.max_scores:
        raise SpecError(
            "return_aux asks for max_scores, the largest score of each row, which kernels do not "
            "keep. Pass attngen.attention(…, return_max_logit=True) for that of each head."
        )
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    found = attention(
        *(query, key, value),
        layout="bhsd",
        score_mod=score_mod,
        block_mask=block_mask,
        softmax_scale=scale,
        return_lse=wants_lse,
        **options,
    )
    out, lse = found, None
    if wants_lse:
        out, aux = found
        lse = aux.lse
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse, max_scores=None)
