"""Gradients of rows that meet their keys in parts: D once, dQ summed in one workspace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.numbers import Arguments
from ...call.prepare.parts import AllRows, NamedLaunches, PreparedPart, prepare_part
from ...call.table import INPUTS
from .backward import readable
from .descriptions import described, described_by_name, device_of
from .operation import current, format_of, is_current, start
from .torch_private import guard, is_plain

prepared_parts: CallCache[tuple[PreparedPart | None]] = CallCache(guard)
Pair = tuple[Tensor, Tensor]


class RowSums:
    """Sums of dQ of some rows, [b, t, h, d], whose keys come in parts.

    out, lse, d_out, dlse: of all rows, once all parts are merged, LSEs [b, h, t]; dlse is None
    where nothing depends on the LSE. Kernels run on the current stream.
    """

    def __init__(
        self, q: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, dlse: Tensor | None
    ) -> None:
        self._q = q
        rows = {"o": out, "d_o": d_out, "lse": lse.contiguous()}
        if dlse is not None:
            rows["dlse"] = dlse.float().contiguous()
        self._rows = rows
        self._first: PreparedPart | None = None
        self._kept: tuple[int, ...] = ()
        self._workspace: Tensor | None = None

    def add(self, first: int, q: Tensor, keys: Pair, into: Pair, given: dict[str, Any]) -> bool:
        """Add the gradients of a part; False, with nothing done, where kernels keep no such sums,
        as where its rows are no whole blocks of all.

        first: of its rows, which q has; keys: k and v; into: float32 tensors of their shapes, which
        get dK and dV. given: arguments of `attngen::backward`, with out_dtype float32.
        Raises: SpecError with every violation; CompileError, LaunchError.
        """
        (k, v), (dk, dv) = keys, into
        end = first + q.shape[1]
        own = {name: x[:, first:end] for name, x in self._rows.items() if name in ("o", "d_o")}
        own |= {n: x[:, :, first:end] for n, x in self._rows.items() if n in ("lse", "dlse")}
        optional = {name: given.get(name) for name in INPUTS}
        tensors = {"dlse": None, **own, **optional, "q": q, "k": k, "v": v}
        there = {name: x for name, x in tensors.items() if x is not None}
        if not all(map(is_plain, (*there.values(), dk, dv))):
            return False
        arguments = Arguments(**{n: x for n, x in given.items() if n in Arguments._fields})
        gather = not all(map(readable, (q, k, v, *(self._rows[name] for name in ("o", "d_o")))))
        whole = {"q": self._q, **self._rows, "dk": dk, "dv": dv}
        key = (arguments, gather, first, *map(format_of, (*tensors.values(), *whole.values())))
        (prepared,) = prepared_parts.remember(
            key,
            lambda: (
                prepare_part(
                    described_by_name(tensors),
                    arguments,
                    gather,
                    device_of(q.device),
                    AllRows(first, {name: described(x) for name, x in whole.items()}),
                ),
            ),
        )
        if prepared is None or not self._begins(prepared):
            return False
        addresses = {name: x.data_ptr() for name, x in {**there, "dk": dk, "dv": dv}.items()}
        _launch(prepared.part, addresses, prepared.kept_at(self._kept))
        return True

    def end(self, rounds: bool = False) -> Tensor | None:
        """The gradient of q, float32, or, if it `rounds` and kernels do, in q's dtype, contiguous;
        None where no part has been added."""
        if self._first is None:
            return None
        after, dtype = self._first.after, torch.float32
        if rounds and (rounded := self._first.rounded) is not None:
            after, dtype = rounded, self._q.dtype
        dq = self._q.new_empty(self._q.shape, dtype=dtype)
        _launch(after, {"dq": dq.data_ptr()}, self._kept)
        return dq

    def _begins(self, prepared: PreparedPart) -> bool:
        """Make D and the LSE of all rows ahead of the first part; whether a part's kernels find
        these, and sums, where they are."""
        if self._first is not None:
            return prepared.form == self._first.form
        self._first = prepared
        size = (prepared.workspace_bytes,)
        self._workspace = self._q.new_empty(size, dtype=torch.uint8)
        base = self._workspace.data_ptr()
        self._kept = tuple(base + place for place in prepared.places)
        addresses = {name: x.data_ptr() for name, x in self._rows.items()}
        _launch(prepared.before, addresses, self._kept)
        return True


def _launch(prepared: NamedLaunches, addresses: dict[str, int], kept: tuple[int, ...]) -> None:
    """Launch kernels on the current stream. kept: addresses of workspaces, which come last."""
    if not is_current(prepared.device):
        with current(prepared.device):
            return _launch(prepared, addresses, kept)
    names = prepared.names[: len(prepared.names) - len(kept)]
    start(prepared, [*(addresses[name] for name in names), *kept])
    return None
