"""FP8 calls of `attngen.attention`: what reaches the operation, computed by the reference here."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import SpecError, reference
from attngen.call.numbers import Arguments
from attngen.call.tensors import name_of
from attngen.frontends.pytorch import checked_call
from attngen.frontends.pytorch import routing as choice
from attngen.frontends.pytorch.signature import dtype_of, split
from tests.support.caches import FORWARD, forget
from tests.support.fp8_kit import E4M3, E5M2, keywords_of, operands, rest_of, same, scales


@pytest.fixture
def on_reference(monkeypatch):
    """The CPU passes for a device with kernels; the reference computes the operation there.
    Yields the list of the calls that reached it."""
    calls = []

    def forward(q, k, v, *rest):
        optional, arguments = split(rest)
        calls.append(arguments)
        out, aux = reference.attention(
            q, k, v, layout=arguments.layout, mask=arguments.mask,
            softmax_scale=arguments.softmax_scale, bottom_right=arguments.bottom_right,
            window=(arguments.window_left, arguments.window_right), return_amax=True,
            out_dtype=arguments.out_dtype and dtype_of(arguments.out_dtype),
            softcap=arguments.softcap, softmax=arguments.softmax,
            return_max_logit=True, **keywords_of(optional),
        )  # fmt: skip
        empty = q.new_empty(0, dtype=torch.float32)
        maxima = (aux.amax_s, aux.amax_o) if arguments.amax else (empty, empty)
        maxima += (aux.max_logit if arguments.max_logit else empty,)
        return out, aux.lse, *(x.clone() for x in maxima)

    monkeypatch.setattr(choice, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(checked_call, "unobserved", lambda tensors: False)
    forget(monkeypatch, *FORWARD)
    library = torch.library.Library("attngen", "IMPL")
    library.impl("forward", forward, "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("out_dtype", [None, torch.float16, E4M3, E5M2])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_call_with_every_argument_equals_the_reference(on_reference, out_dtype, kv_dtype):
    given = scales()
    if out_dtype not in (E4M3, E5M2):
        del given["scale_o"]
    arguments = {
        **{"mask": "causal_bottom_right", "window": (3, -1), "softmax_scale": 0.3},
        **{"out_dtype": out_dtype, "return_amax": True, "return_lse": True, **given},
    }
    q, k, v = operands(kv_dtype=kv_dtype)
    want, want_aux = attngen.attention(q, k, v, **arguments, backend="reference")
    for _ in range(2):  # checked, then settled
        out, aux = attngen.attention(q, k, v, **arguments, backend="cuda")
        assert out.dtype == (out_dtype or torch.bfloat16) and same(out, want)
        for name in ("lse", "amax_s", "amax_o"):
            assert torch.equal(getattr(aux, name), getattr(want_aux, name)), name
    expected = Arguments(
        *("bshd", "causal_bottom_right", 0.3, 3, -1, True),
        out_dtype=name_of(out.dtype),
        amax=True,
    )
    assert on_reference == [expected] * 2


def test_call_without_maxima_returns_none_of_them(on_reference):
    _, aux = attngen.attention(*operands(), return_lse=True, backend="cuda")
    assert aux.lse is not None and aux.amax_s is None and aux.amax_o is None
    out = attngen.attention(*operands(), backend="cuda")
    assert isinstance(out, torch.Tensor) and len(on_reference) == 2


def test_known_calls_differ_in_scales_output_and_maxima(on_reference):
    q, k, v = operands()
    variants = [
        {},
        {"descale_q": torch.tensor([2.0])},
        {"descale_k": torch.tensor([2.0])},
        {"descale_q": torch.full((2, 2), 3.0)},
        {"out_dtype": E4M3},
        {"out_dtype": E4M3, "scale_o": torch.tensor([2.0])},
        {"out_dtype": E5M2},
        {"out_dtype": torch.float16},
    ]
    for arguments in [*variants, *variants]:
        out = attngen.attention(q, k, v, **arguments, backend="cuda")
        assert same(out, attngen.attention(q, k, v, **arguments, backend="reference"))
    changed = torch.tensor([2.0])
    first = attngen.attention(q, k, v, descale_v=changed, backend="cuda")
    changed.fill_(4.0)  # the value is the kernel's to read, at each call
    second = attngen.attention(q, k, v, descale_v=changed, backend="cuda")
    assert torch.equal(2 * first, second)


@pytest.mark.parametrize("wrong", [{"descale_q": 1.0}, {"scale_s": [1.0]}, {"descale_v": "1"}])
def test_call_scale_that_is_no_tensor_is_refused(on_reference, wrong):
    attngen.attention(*operands(), backend="cuda")
    with pytest.raises(SpecError, match=next(iter(wrong))):
        attngen.attention(*operands(), **wrong, backend="cuda")


def test_call_16_bits_with_a_scale_is_refused_after_one_without(on_reference, monkeypatch):
    monkeypatch.setattr(checked_call.CheckedCall, "launch", lambda *rest: "launched")
    q, k, v = (x.half() for x in operands())
    assert attngen.attention(q, k, v, backend="cuda") == "launched"
    for wrong in ({"descale_q": torch.ones(1)}, {"return_amax": True}, {"out_dtype": E4M3}):
        with pytest.raises(SpecError, match=next(iter(wrong))):
            attngen.attention(q, k, v, **wrong, backend="cuda")


def test_call_scale_that_wants_a_gradient_is_refused_after_one_that_does_not(on_reference):
    scale = torch.ones(1)
    attngen.attention(*operands(), descale_v=scale, backend="cuda")
    with pytest.raises(SpecError, match="no backward"):
        attngen.attention(*operands(), descale_v=scale.requires_grad_(), backend="cuda")
    with torch.no_grad():
        attngen.attention(*operands(), descale_v=scale, backend="cuda")


@pytest.mark.parametrize("change", ["head dim", "head dim v", "score_mod"])
def test_call_without_a_kernel_is_refused(on_reference, change):
    q, k, v = operands()
    arguments = {}
    if change == "head dim":
        q, k = q[..., :24], k[..., :24]
    elif change == "head dim v":
        v = v[..., :8]
    else:
        arguments = {"score_mod": lambda score, *place: score}
    with pytest.raises(SpecError, match="multiples of 16|score_mod"):
        attngen.attention(q, k, v, **arguments, backend="cuda")
    assert not on_reference
    # The reference, with a log line.
    out = attngen.attention(q, k, v, **arguments, backend="auto")
    assert out.dtype == torch.bfloat16 and not on_reference


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_call_compiled_whole_equals_the_eager_one(on_reference, backend):
    torch._dynamo.reset()

    def model(q, k, v, given):
        out, aux = attngen.attention(
            q, k, v, mask="causal", out_dtype=E4M3, return_lse=True, return_amax=True,
            backend="cuda", **given,
        )  # fmt: skip
        return out.float() * aux.amax_o, aux.lse + aux.amax_s

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    arguments = (*operands(), scales())
    with torch.no_grad():
        for got, want in zip(compiled(*arguments), model(*arguments), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("amax", [False, True])
def test_op_passes_opcheck(on_reference, amax):
    torch.library.opcheck(
        torch.ops.attngen.forward,
        (*operands(), *rest_of(E4M3, amax, **scales())),
        # test_schema compares operands with an arithmetic that 8-bit floats lack.
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
