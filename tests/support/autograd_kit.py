"""The CPU passes for a device with kernels: the reference computes both operations there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from attngen import reference
from attngen.call.fragments import LEARNED_SLOT
from attngen.call.numbers import Arguments
from attngen.call.table import OPTIONAL
from attngen.frontends.pytorch import checked_call
from attngen.frontends.pytorch import routing as choice
from attngen.frontends.pytorch.calls import calls
from attngen.frontends.pytorch.signature import dtype_of, split, wanted_of

from .caches import forget


class OnReference:
    """Stands in for the kernels; `calls` are those of the two operations, in order, each a name
    and what else there is to know of it."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[tuple] = []
        monkeypatch.setattr(choice, "device_arch", lambda device: "sm_90a")
        monkeypatch.setattr(checked_call, "unobserved", lambda tensors: False)
        forget(monkeypatch, calls)
        self.library = torch.library.Library("attngen", "IMPL")
        self.library.impl("forward", self.forward, "CPU")
        self.library.impl("backward", self.backward, "CPU")

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def forward(self, q, k, v, *rest):
        optional, arguments = split(rest)
        self.calls.append(("forward", arguments))
        with torch.no_grad():
            out, lse = call(q, k, v, named(optional), arguments)
        return out, lse.float().clone(), *(q.new_empty(0, dtype=torch.float32) for _ in range(3))

    def backward(self, d_o, dlse, q, k, v, o, lse, *rest):
        (optional, arguments), wanted = split(rest), wanted_of(rest)
        extra = named(optional)
        self.calls.append(("backward", arguments, wanted, dlse is not None))

        def gradients():
            operands = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            given = dict(extra)
            learned = [name for name in ("sink", "bias") if name in extra]
            given |= {n: extra[n].detach().clone().requires_grad_() for n in learned}
            results, incoming = call(*operands, given, arguments), (d_o, dlse)
            if dlse is None:
                results, incoming = results[:1], incoming[:1]
            operands += [given[name] for name in learned]
            names = ["q", "k", "v", *learned]
            return dict(zip(names, torch.autograd.grad(results, operands, incoming), strict=True))

        with ThreadPoolExecutor(1) as pool:  # in this thread the dispatcher is past autograd
            found = pool.submit(gradients).result()
        kinds = {"q": wanted.dq, "k": wanted.dkv, "v": wanted.dkv}
        kinds |= {"sink": wanted.dsink, "bias": wanted.dbias, LEARNED_SLOT: False}
        absent = {"bias": q.new_empty(0)} | dict.fromkeys(("sink", LEARNED_SLOT), lse.new_empty(0))
        return tuple(
            found[name].contiguous() if want and name in found else absent.get(name, q).new_empty(0)
            for name, want in kinds.items()
        )


def named(optional):
    """Name the optional tensors that are given, but for a schedule, which changes no result."""
    there = zip(OPTIONAL, optional, strict=True)
    return {n: x for n, x in there if x is not None and n != "schedule"}


def call(q, k, v, given: dict, arguments: Arguments):
    """Output and LSE by the reference."""
    out, aux = reference.attention(
        q, k, v, layout=arguments.layout, mask=arguments.mask,
        softmax_scale=arguments.softmax_scale, bottom_right=arguments.bottom_right,
        window=(arguments.window_left, arguments.window_right),
        out_dtype=arguments.out_dtype and dtype_of(arguments.out_dtype),
        softcap=arguments.softcap, softmax=arguments.softmax, bias_type=arguments.bias_type,
        **given,
    )  # fmt: skip
    return out, aux.lse
