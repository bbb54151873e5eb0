"""`attngen.fp8`: attention of 16-bit models in FP8, by recipes that choose the scales.

    with attngen.fp8.autocast():
        out = model(x)          # whose attention() runs in FP8
    loss(out).backward()        # with gradients in 16 bits

docs/guide/fp8-training.md is the guide.
"""

from .checkpointing import checkpoint_contexts
from .layer import Attention
from .quantizers import CurrentQuantizer, DelayedQuantizer, Quantizer
from .recipes import DelayedScaling, Float8CurrentScaling, Format
from .scaling import autocast
from .tensor import Float8Tensor

__all__ = [
    "Attention",
    "CurrentQuantizer",
    "DelayedQuantizer",
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8Tensor",
    "Format",
    "Quantizer",
    "autocast",
    "checkpoint_contexts",
]
