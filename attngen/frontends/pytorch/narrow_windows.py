"""Narrow: which backwards add up dQ in an order though their calls ask for none."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.run_time import Extent, Scalars

# Keys of a window up to which kernels with an order are faster, by the least head dim. Measured:
# 1.05 to 1.29 times at 128, 1.08 to 1.12 at 64, 1.03 at 32, where nothing is known of wider ones.
KEYS = ((64, 1024), (1, 256))
GROUPED_SHARE = 2  # of them, where heads share keys and values: these lose with 1024


def is_narrow(extents: Mapping[str, Extent], scalars: Scalars) -> bool:
    """Whether a window leaves each query so few keys that kernels with an order are faster, where
    there are any."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    most = next(most for least, most in KEYS if max(q.dim, v.dim) >= least)
    keys = scalars.window_left + scalars.window_right
    return keys <= (most if q.heads == k.heads else most // GROUPED_SHARE)
