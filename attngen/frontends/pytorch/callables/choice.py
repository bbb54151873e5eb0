"""Who is to serve calls with functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ....call.backend import AUTO
from ....call.table import AttentionCall
from .. import descriptions
from ..checked_call import arguments_of, operands_of
from ..checks import traced_refusal
from ..sharding import is_distributed
from ..torch_private import PLAIN, is_traced
from . import compiled, shards, transforms
from .compiled import is_traced_call


def other_way(call: AttentionCall) -> Callable[..., Any] | None:
    """The function that makes other calls of one, of `attention` and the call; None where kernels,
    or the reference, see this one."""
    if torch.compiler.is_compiling():
        # Others, as torch.export, follow Python, and have no graphs of functions.
        unseen = torch.compiler.is_dynamo_compiling() and not is_traced_call(call)
        traced = unseen and may_have_kernels(call)
        return compiled.attend if traced else None
    return shards.attend if is_distributed((call.q, call.k, call.v)) else None


def may_have_kernels(call: AttentionCall) -> bool:
    """Whether kernels are to serve a call, if they can, and nobody looks on but torch.compile."""
    carriers = call.q, call.k, call.v
    if call.backend == "reference" or is_distributed(carriers):
        return False
    if not transforms.pass_by(call):
        return False
    if not (torch.compiler.is_dynamo_compiling() or is_traced_call(call)):
        # Others have values that nobody may read, or are parts of DTensors, say.
        plain = all([x is None or type(x) in PLAIN for x in carriers])
        if is_traced(carriers) or not plain:
            return False
    return descriptions.device_arch(call.q.device) is not None


def refuse_before_launch(call: AttentionCall) -> None:
    """Raises: SpecError where kernels refuse a call in compiled code for what only launches see."""
    if call.backend != AUTO or not is_traced_call(call):
        return
    plain = replace(call, score_mod=None, mask_mod=None, block_mask=None)
    refusal = traced_refusal(operands_of(plain), arguments_of(plain), call.backend)
    if refusal is not None:
        raise refusal
