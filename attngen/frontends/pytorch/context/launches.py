"""Launches over a group: one call of packed tokens for parts of many sequences.

Tensors are [1, t, h, d] here, LSEs [1, h, t]. Numbers of launches are on their device once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.context.launches import Launch
from ....call.context.packed import Runs, tokens_of_runs
from ....call.positions import PLACES_SLOT
from ....call.table import GRADIENT_OF
from .. import backward, forward_onto  # noqa: F401  # define the operations
from ..attention import attention
from .kept import on_device
from .parts import Attended, Features, Merged, Stored, gradients_within, sink_weights

KEPT = 1024  # launches, and indices, whose numbers are on a device


class Numbers(NamedTuple):
    """A launch's integers: lengths and first tokens of queries and of keys, places, marks, and the
    sequence of each part."""

    ends_q: Tensor
    starts_q: Tensor
    ends_kv: Tensor
    starts_kv: Tensor
    places: Tensor | None
    marks: Tensor
    sequences: Tensor


@on_device(KEPT)
def numbers_of(launch: Launch, device: torch.device) -> Numbers:
    """The integers of a launch, which nobody writes, in one copy from the host."""
    count = len(launch.parts)
    rows: list[int] = []
    for spans in (launch.queries, launch.keys):
        *_, last = spans
        rows += accumulate(map(len, spans), initial=0)
        rows += [*(span.begin for span in spans), last.end]
    rows += [n for place in launch.places or () for n in place]
    rows += [*(launch.marks or (0,) * count), *(part.sequence for part in launch.parts)]
    with torch.inference_mode(False):
        whole = torch.tensor(rows, dtype=torch.int32, device=device)
        sizes = [count + 1] * 4 + [4 * count * (launch.places is not None), count, count]
        ends_q, starts_q, ends_kv, starts_kv, places, marks, sequences = whole.split(sizes)
        stands = places.view(count, 4) if launch.places is not None else None
        ends = ends_q, starts_q, ends_kv, starts_kv
        return Numbers(*ends, stands, marks, sequences)


@on_device(KEPT)
def index_of(runs: Runs, device: torch.device) -> Tensor:
    """The tokens of runs, on a device."""
    with torch.inference_mode(False):
        return torch.tensor(tokens_of_runs(runs), dtype=torch.int64, device=device)


def _given(features: Features, launch: Launch, numbers: Numbers) -> dict[str, Any]:
    """The arguments that a launch's operation and `attention` have in common."""
    left, right = launch.window
    given = {**features.numbers, "layout": "thd"}
    if right == 0:
        given["mask"], right = "causal", -1
    given |= {"cu_seqlens_q": numbers.ends_q, "cu_seqlens_q_padded": numbers.starts_q}
    given |= {"cu_seqlens_kv": numbers.ends_kv, "cu_seqlens_kv_padded": numbers.starts_kv}
    if (slopes := features.slopes) is not None:
        own = slopes.index_select(0, numbers.sequences) if slopes.ndim == 2 else slopes
        given["alibi_slopes"] = own
    if features.rng_state is not None:
        given["rng_state"] = features.rng_state
    return {**given, "window": (left, right)}


def _of_operation(features: Features, launch: Launch, numbers: Numbers) -> dict[str, Any]:
    """The arguments of a launch's operation, whose outputs and gradients are float32."""
    given = _given(features, launch, numbers)
    left, right = given.pop("window")
    if numbers.places is not None:
        given["positions"] = f"0 0 0 {features.first_head} 0"
        given[PLACES_SLOT] = numbers.places
    return {**given, "window_left": left, "window_right": right, "out_dtype": "float32"}


def _of_attention(features: Features, launch: Launch, numbers: Numbers) -> dict[str, Any]:
    """The arguments of `attention` for a launch."""
    given = _given(features, launch, numbers)
    if numbers.places is not None:
        given |= {"positions": (0, 0, 0, features.first_head), "places": numbers.places}
    return given


@dataclass(eq=False)
class RunningRows:
    """Output and LSE of all of a rank's rows over the keys that have come by.

    sums, lse: float32 or float64, LSEs −∞ of rows that have seen no key, whose sums may be
    anything where kernels join; rounded: the output in q's dtype, as kernels round it.
    """

    sums: Tensor
    lse: Tensor
    rounded: Tensor | None

    @classmethod
    def before(
        cls,
        q: Tensor,
        v: Tensor,
        dtype: torch.dtype,
        joins: bool,
        sink: Tensor | None,
        used: Tensor | None,
        covered: bool,
    ) -> RunningRows:
        """No keys yet, but the score of each head that no key has, [h], in the rows `used`. joins:
        whether kernels do; covered: whether they come to all rows."""
        _, tokens, heads, _ = q.shape
        shape = (*q.shape[:-1], v.shape[-1])
        new = torch.empty if joins and sink is None else torch.zeros
        sums = new(shape, dtype=dtype, device=q.device)
        lse = sums.new_full((1, heads, tokens), -torch.inf)
        if sink is not None:
            assert used is not None
            lse[:, :, used] = sink[:, None]
        fresh = torch.empty if covered else torch.zeros
        rounded = fresh(shape, dtype=q.dtype, device=q.device) if joins else None
        return cls(sums, lse, rounded)

    def attend(self, features: Features, launch: Launch, read: Attended) -> None:
        """Join a launch's parts by kernels that go on from what there is."""
        numbers = numbers_of(launch, read.q.device)
        assert self.rounded is not None
        torch.ops.attngen.forward_onto(
            *(x.squeeze(0) for x in read.carriers),
            self.sums.squeeze(0),
            self.lse.squeeze(0),
            self.rounded.squeeze(0),
            numbers.marks,
            True,
            True,
            **_of_operation(features, launch, numbers),
        )

    def add(
        self, features: Features, launch: Launch, read: Attended, stored: Stored | None
    ) -> None:
        """Join a launch's parts, whose outputs are made by themselves. stored: whose numbers they
        read, of which outputs are rounded to what they stand for."""
        given = _of_attention(features, launch, numbers_of(launch, read.q.device))
        if stored is not None:
            given |= {**stored.descales, "out_dtype": stored.wide}
        elif features.kernels:
            given["out_dtype"] = torch.float32
        backend = "cuda" if features.kernels else "reference"
        with torch.no_grad():
            carriers = (x.squeeze(0) for x in read.carriers)
            out, aux = attention(*carriers, **given, backend=backend, return_lse=True)
        lse = aux.lse[None].to(self.lse.dtype)
        joined = torch.logaddexp(self.lse, lse)
        share = (lse - joined).exp().masked_fill(joined == -torch.inf, 0)
        self.sums.lerp_(out[None].to(self.sums.dtype), share.transpose(1, 2).unsqueeze(-1))
        self.lse = joined


def gradients_of(
    features: Features, launch: Launch, read: Attended, merged: Merged
) -> dict[str, Tensor]:
    """Gradients of all tokens of q, k and v by a launch's parts, [1, t, h, d], by the names `dq`,
    `dk` and `dv`: 0 of tokens of none; float32 of 16 bits."""
    numbers = numbers_of(launch, read.q.device)
    q, k, v = (x.squeeze(0) for x in read.carriers)
    alone = Attended(q, k, v, None)
    dlse = None if merged.dlse is None else merged.dlse.squeeze(0).contiguous()
    rows = Merged(merged.out.squeeze(0), merged.lse.squeeze(0), merged.d_out.squeeze(0), dlse)
    if features.kernels:
        made = torch.ops.attngen.backward(
            *(rows.d_out, dlse, *alone.carriers, rows.out, rows.lse.contiguous()),
            **_of_operation(features, launch, numbers),
            deterministic=features.deterministic,
        )
        found = dict(zip(GRADIENT_OF.values(), made, strict=True))
    else:
        found = _by_reference(_of_attention(features, launch, numbers), alone, rows)
    return {name: found[name][None] for name in ("dq", "dk", "dv")}


def _by_reference(given: dict[str, Any], read: Attended, merged: Merged) -> dict[str, Tensor]:
    """Gradients of a launch, whose output and LSE are made again, as those of the merge say."""
    leaves = [x.detach().requires_grad_() for x in read.carriers]
    with torch.enable_grad():
        out, aux = attention(*leaves, **given, backend="reference", return_lse=True)
    lse = aux.lse
    assert lse is not None
    wanted = torch.autograd.grad([out, lse], leaves, gradients_within(merged, out, lse))
    return dict(zip(("dq", "dk", "dv"), wanted, strict=True))


def sink_gradient_of_rows(sink: Tensor, merged: Merged, used: Tensor) -> Tensor:
    """The gradient of the sink [h] by the rank's rows in use: −Σ e^(α − LSE) · D."""
    lse = merged.lse[:, :, used]
    out, d_out = (x[:, used].to(lse.dtype) for x in (merged.out, merged.d_out))
    delta = (out * d_out).sum(-1).transpose(1, 2)
    if merged.dlse is not None:
        delta = delta - merged.dlse[:, :, used]
    return -(sink_weights(sink, lse) * delta).sum((0, 2)).to(sink.dtype)
