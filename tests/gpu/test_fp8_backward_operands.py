"""Operands of the backward in 8 bits: one tensor, views, addresses, NaN beside sequences, masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen import SpecError
from attngen.call.table import GRADIENT_OF, OPTIONAL
from attngen.frontends.pytorch.fp8_backward import SCALES

from . import oracle, test_fp8_backward
from .oracle_fp8 import DTYPES
from .test_fp8_backward import MAXIMA, NAMES, Case, Given, check, given

pytestmark = pytest.mark.gpu
PACKED = Case(heads=(2, 3, 3), sizes=(129, 129), dims=(48, 48), mask="causal", grad="e5m2",
              deterministic=True)  # fmt: skip
TOKENS = Case(layout="thd", lengths=((70, 65, 33), (64, 129, 100)), dims=(64, 48), heads=(1, 3, 1),
              grad="e5m2", deterministic=True, dlse=True)  # fmt: skip
WIDE_TOKENS = replace(TOKENS, dims=(192, 128), heads=(1, 1, 1), dlse=False)
# Five tiles of keys, which two CTAs transpose.
SINK = Case(sizes=(60, 577), dims=(32, 16), dtype="e5m2", softmax="learnable", deterministic=True)
MASKED = Case(layout="thd", lengths=((70, 0, 65, 129), (64, 20, 193, 129)), dims=(64, 48),
              heads=(1, 5, 1), attn_mask="b1ss", deterministic=True)  # fmt: skip
KERNELS = [
    *(case.spec for case in (PACKED, TOKENS, WIDE_TOKENS, SINK, MASKED)),
    replace(PACKED.spec, layout="bs3hd"),
]


def call_of(made: Given, q: Tensor, *others: Tensor | None, **more: Any) -> tuple[Any, Any]:
    """Operands and arguments of the operation, by position and by name. others: k and v."""
    case, its = made.case, made.backward
    names = {name: x for name, x in made.arguments.items() if name in OPTIONAL}
    names |= {name: getattr(its, name) for name in SCALES}
    names |= {"layout": case.layout, "mask": case.mask, "softmax": case.softmax, "amax": True}
    names |= {"out_dtype": str(DTYPES[case.grad]).removeprefix("torch.")}
    names |= {"deterministic": case.deterministic, **more}
    return (its.d_o, its.dlse, q, *others, its.o, its.lse), names


def stacked(tensors: tuple[Tensor, ...], axis: int) -> Tensor:
    """8-bit tensors in one, as bytes: torch stacks no others."""
    return torch.stack([x.view(torch.uint8) for x in tensors], axis).view(tensors[0].dtype)


def beside(x: Tensor, start: int) -> Tensor:
    """A copy that begins `start` bytes behind where an allocation does."""
    room = torch.zeros(x.numel() + start, dtype=torch.uint8, device=x.device)
    room[start:] = x.view(torch.uint8).flatten()
    return room[start:].view(x.shape).view(x.dtype)


def test_one_tensor_has_the_gradients_of_its_parts() -> None:
    made = given(PACKED)
    apart = made.run()
    one = stacked((made.q, made.k, made.v), 2)
    positional, named = call_of(made, one, None, None, layout="bs3hd")
    together, *others = torch.ops.attngen.fp8_backward(*positional, **named)
    for place, name in enumerate(NAMES):
        assert torch.equal(together[:, :, place].float(), apart[name].float()), name
    assert oracle.same(others[-len(MAXIMA) :], [apart[name] for name in MAXIMA])


def test_views_of_wider_tensors_have_the_same_gradients() -> None:
    made = given(PACKED)
    wide = [torch.nn.functional.pad(x.view(torch.uint8), (0, 16, 1, 1), value=0x7F).view(x.dtype)
            for x in (made.q, made.k, made.v, made.backward.d_o)]  # fmt: skip
    q, k, v, d_o = (x[:, :, 1:-1, :-16] for x in wide)
    found = Given(made.case, q, k, v, replace(made.backward, d_o=d_o), made.arguments).run()
    want = made.run()
    assert all(torch.equal(found[n].float(), want[n].float()) for n in (*NAMES, *MAXIMA))


def test_operands_at_odd_addresses_are_refused_and_output_gradients_copied() -> None:
    """Refusals come before any launch: no tensor map guards the first kernel, which reads Q and K
    in 16 bytes at once."""
    made = given(SINK)
    for name in "qkv":
        with pytest.raises(SpecError, match="start at a multiple of 16 bytes"):
            replace(made, **{name: beside(getattr(made, name), 8)}).run()
    want, found = made.run(), made.run(d_o=beside(made.backward.d_o, 8))
    check(made, want)
    assert all(torch.equal(found[name], want[name]) for name in NAMES)


@pytest.mark.parametrize("case", [TOKENS, WIDE_TOKENS], ids=["narrow", "wide"])
def test_nan_of_a_sequence_stays_in_it(case: Case) -> None:
    made = given(case)
    want, its = made.run(), made.backward
    of_q, of_kv = slice(70, 135), slice(64, 193)
    spare = {"q": slice(168, None), "kv": slice(293, None)}
    for x, own, beyond in ((made.q, of_q, spare["q"]), (its.d_o, of_q, spare["q"]),
                           (made.k, of_kv, spare["kv"]), (made.v, of_kv, spare["kv"])):  # fmt: skip
        x.view(torch.uint8)[own] = 0x7F
        x.view(torch.uint8)[beyond] = 0x7F
    for rows in (of_q, spare["q"]):
        its.o[rows] = float("nan")
        its.lse[:, rows] = float("nan")
        if its.dlse is not None:
            its.dlse[:, rows] = float("nan")
    found = made.run()
    for name, own in zip(NAMES, (of_q, of_kv, of_kv), strict=True):
        got, expected = found[name].float(), want[name].float()
        assert got[own].isnan().any(), name
        assert torch.equal(got[: own.start], expected[: own.start]), name
        assert torch.equal(got[own.stop :], expected[own.stop :]), name


def test_gradients_are_as_wanted_and_the_operation_passes_opcheck() -> None:
    made = given(SINK)
    full = made.run()
    carried = {"dq": "want_dq", "dk": "want_dkv", "dv": "want_dkv", "dsink": "want_dsink"}
    for unwanted in ("want_dq", "want_dkv", "want_dsink"):
        positional, named = call_of(made, made.q, made.k, made.v, **{unwanted: False})
        results = torch.ops.attngen.fp8_backward(*positional, **named)
        found = dict(zip(GRADIENT_OF.values(), results, strict=False))
        for name, flag in carried.items():
            same = torch.equal(found[name], full[name])
            assert same if flag != unwanted else found[name].shape == (0,), name
    torch.library.opcheck(
        torch.ops.attngen.fp8_backward.default,
        positional,
        named,
        # test_schema compares operands with an arithmetic that 8-bit floats lack.
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_mask_may_hide_whole_tiles_rows_and_keys_of_packed_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = torch.rand(4, 1, 130, 193, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[..., :64, :] = False
    mask[..., 7] = False
    mask[..., 128:192] = False
    monkeypatch.setattr(test_fp8_backward, "random_mask", lambda *_: mask.to(oracle.DEVICE))
    made = given(MASKED)
    check(made, made.run())
