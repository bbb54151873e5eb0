"""The backward in 8 bits against its definition: gradients, maxima, extreme scales, refusals.

With G64 the exact gradient of the numbers that the operands stand for, and e the root of the mean
square of the definition's error against it (`reference.fp8_backward`, which stores weights and
gradients of scores in 8 bits where kernels do), a kernel's may be 1.1 e, 1e-3 of G64's own and
1e-4, since sums of operands near 1 cancel; its largest error 2 times the definition's largest,
1e-3 of the largest element and 1e-4. Maxima of gradients may be as far from the definition's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen import AttentionSpec, SpecError, reference
from attngen.call.numbers import Arguments
from attngen.call.table import GRADIENT_OF, OPTIONAL
from attngen.frontends.pytorch.fp8_backward import SCALES
from attngen.reference import BackwardOperands, Fp8Gradients, fp8, fp8_backward

from . import oracle
from .oracle_fp8 import DTYPES
from .test_attn_mask import random_mask
from .test_bias import sizes_of

pytestmark = pytest.mark.gpu
NAMES = ("dq", "dk", "dv")
CANCELLED = 1e-4  # of sums of operands near 1
MAXIMA = ("amax_dp", "amax_dq", "amax_dk", "amax_dv")
UNITS = {"descale_q": 1.25, "descale_k": 0.75, "descale_v": 1.5}


def scale(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device=oracle.DEVICE)


@dataclass(frozen=True)
class Case:
    """A call and the dtypes of its backward. heads: batch, h_q, h_kv; dims: of Q and V; arguments:
    of attention. attn_mask, bias: the broadcast of a mask of bits, and of a bias. lengths: of
    sequences, of queries and of keys, packed behind each other in thd."""

    heads: tuple[int, int, int] = (1, 2, 1)
    sizes: tuple[int, int] = (130, 200)
    dims: tuple[int, int] = (128, 128)
    dtype: str = "e4m3"
    d_o: str = "e5m2"
    grad: str = "bf16"
    o: str = "bf16"
    layout: str = "bshd"
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    mask: str = "none"
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    softmax: str = "vanilla"
    softcap: float = 0.0
    alibi: bool = False
    attn_mask: str = ""
    bias: str = ""
    dropout: float = 0.0
    scale_s: float | None = None
    deterministic: bool = False
    dlse: bool = False
    mixed: bool = False

    def __str__(self) -> str:
        plain = Case()
        fields = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return "-".join(f"{n}={x}" for n, x in fields if getattr(plain, n) != x) or "plain"

    @property
    def spec(self) -> AttentionSpec:
        """The spec of its kernels."""
        return AttentionSpec(
            head_dim=self.dims[0],
            head_dim_v=self.dims[1],
            dtype=self.dtype,
            out_dtype=self.o,
            grad_dtype=self.grad,
            d_o_dtype=self.d_o,
            layout=self.layout,
            mask=self.mask,
            window=self.window != (-1, -1),
            softcap=self.softcap > 0,
            alibi=self.alibi,
            attn_mask=bool(self.attn_mask),
            bias="post_scale" if self.bias else "none",
            dropout=self.dropout > 0,
            seqused=self.lengths is not None and self.layout != "thd",
            softmax=self.softmax,
            deterministic=self.deterministic,
            backward="mixed" if self.mixed else None,
            directions=("bwd",),
        )


CASES = [
    Case(),
    Case(heads=(2, 4, 2), sizes=(200, 300), mask="causal", softmax="learnable", dlse=True),
    Case(sizes=(300, 200), mask="causal_bottom_right", bottom_right=True, o="e4m3", grad="e5m2"),
    Case(sizes=(129, 257), dims=(80, 112), window=(60, 0), d_o="e4m3", grad="e4m3", scale_s=64.0),
    Case(heads=(2, 4, 4), sizes=(333, 333), dims=(64, 64), mask="causal", deterministic=True),
    Case(heads=(1, 4, 2), sizes=(300, 300), dims=(32, 48), dtype="e5m2", d_o="e4m3", grad="fp16",
         window=(50, 20), softmax="off_by_one"),
    Case(layout="thd", lengths=((70, 0, 200, 33), (70, 0, 200, 33)), mask="causal"),
    Case(layout="thd", lengths=((70, 0, 200, 33), (100, 20, 64, 300)), dims=(64, 64), o="e5m2",
         grad="e5m2", deterministic=True),
    Case(heads=(3, 2, 1), sizes=(150, 260), lengths=((150, 0, 77), (260, 30, 100)), dims=(96, 64),
         mask="padding_causal_bottom_right", bottom_right=True),
    Case(sizes=(200, 180), mask="causal", alibi=True),
    Case(sizes=(200, 180), dims=(128, 64), softcap=5.0, mask="causal", deterministic=True),
    Case(sizes=(200, 180), dims=(64, 64), softcap=5.0, alibi=True),
    Case(layout="thd", lengths=((70, 0, 200, 33), (70, 0, 200, 33)), mask="causal", alibi=True,
         softcap=3.0, softmax="learnable"),
    Case(heads=(1, 1, 1), sizes=(1, 1), dims=(16, 16)),
    Case(heads=(2, 4, 2), sizes=(200, 300), attn_mask="bhss", softmax="learnable"),
    Case(sizes=(130, 260), dims=(64, 48), mask="causal", attn_mask="b1ss", deterministic=True),
    Case(heads=(1, 3, 1), sizes=(65, 129), dims=(64, 64), mask="causal", deterministic=True,
         dtype="e5m2", grad="e4m3", o="e5m2"),
    Case(heads=(1, 5, 1), sizes=(193, 63), dims=(16, 16), mask="causal_bottom_right",
         bottom_right=True, deterministic=True),
    Case(heads=(2, 4, 2), sizes=(200, 300), mask="causal", softmax="learnable", dropout=0.1,
         dlse=True),
    Case(layout="thd", lengths=((70, 0, 200, 33), (70, 0, 200, 33)), dims=(64, 64), mask="causal",
         dropout=0.6, deterministic=True),
    Case(sizes=(130, 260), dims=(96, 80), dtype="e5m2", d_o="e4m3", o="e5m2", grad="e5m2",
         softcap=5.0, attn_mask="b1ss", dropout=0.5),
    Case(sizes=(200, 180), mask="causal_bottom_right", bottom_right=True, dropout=0.25,
         scale_s=64.0),
    Case(dims=(192, 128)),
    Case(heads=(1, 4, 2), sizes=(200, 130), dims=(256, 256), mask="causal", softmax="learnable",
         dlse=True, grad="e5m2", o="e4m3"),
    Case(layout="thd", lengths=((70, 0, 65), (70, 0, 100)), dims=(192, 192), mask="causal",
         deterministic=True),
    Case(sizes=(129, 140), dims=(208, 144), window=(60, 0), d_o="e4m3", grad="e4m3", scale_s=64.0),
    Case(heads=(2, 2, 1), sizes=(70, 140), lengths=((70, 33), (140, 100)), dims=(80, 224),
         mask="padding_causal_bottom_right", bottom_right=True, grad="fp16"),
    Case(sizes=(65, 140), dims=(160, 32), softcap=5.0, alibi=True, mask="causal",
         deterministic=True),
    Case(layout="thd", lengths=((70, 33), (70, 33)), dims=(192, 128), mask="causal", dropout=0.25,
         softmax="off_by_one", dtype="e5m2"),
    Case(sizes=(70, 130), dims=(256, 192), attn_mask="b1ss"),
    Case(sizes=(65, 130), dims=(48, 128), mask="causal"),
    Case(heads=(1, 2, 2), sizes=(65, 70), dims=(16, 160), grad="e5m2", deterministic=True),
]  # fmt: skip
KERNELS = [case.spec for case in CASES]


@dataclass(frozen=True, eq=False)
class Given:
    """Operands of a case, arguments for the reference, and scales of the backward."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    backward: BackwardOperands
    arguments: dict[str, Any]

    def on(self, device: torch.device) -> Given:
        """Move it to another device."""
        moved = {
            name: x.to(device) if isinstance(x, Tensor) else x
            for name, x in {**vars(self.backward), **self.arguments}.items()
        }
        backward = {name: moved[name] for name in vars(self.backward)}
        return Given(
            self.case,
            *(x.to(device) for x in (self.q, self.k, self.v)),
            BackwardOperands(**backward),
            {name: moved[name] for name in self.arguments},
        )

    def run(self, amax: bool = True, **other: Any) -> dict[str, Tensor]:
        """The kernels' results. other: scales and operands in place of its own."""
        case, given = self.case, replace(self.backward, **other)
        left, right = case.window
        arguments = Arguments(
            layout=case.layout,
            mask=case.mask,
            window_left=left,
            window_right=right,
            bottom_right=case.bottom_right,
            out_dtype=str(DTYPES[case.grad]).removeprefix("torch."),
            amax=amax,
            deterministic=case.deterministic,
            softcap=case.softcap,
            softmax=case.softmax,
            dropout_p=case.dropout,
        )
        optional = [self.arguments.get(name) for name in OPTIONAL]
        scales = [getattr(given, name) for name in SCALES]
        results = torch.ops.attngen.fp8_backward(
            *(given.d_o, given.dlse, self.q, self.k, self.v, given.o, given.lse),
            *(*optional, *arguments, *scales),
            mixed=case.mixed,
        )
        return dict(zip((*GRADIENT_OF.values(), *MAXIMA), results, strict=True))

    def defined(self, exactly: bool) -> Fp8Gradients:
        """By the definition; exactly: of operands that nothing stores in 8 bits."""
        given = replace(self.backward, dtype=torch.float64, mixed=self.case.mixed)
        if exactly:
            unit = given.descale_do
            assert unit is not None
            given = replace(given, d_o=given.d_o.double() * unit, descale_do=None)
            given = replace(given, scale_dp=None, descale_dp=None)
            given = replace(given, scale_dq=None, scale_dk=None, scale_dv=None)
        elif given.scale_dq is not None:
            given = replace(given, dtype=DTYPES[self.case.grad])
        arguments = {**self.arguments, "accumulate": torch.float64}
        return fp8_backward(given, self.q, self.k, self.v, **arguments)


def given(case: Case, seed: int = 0, lowest: bool = False) -> Given:
    """Operands of a case. lowest: a query has a bias of the lowest numbers, and no gradient; some
    keys have one of -inf."""
    batch, heads, heads_kv = case.heads
    lengths = case.lengths or ()
    packed = case.layout == "thd"
    s_q, s_kv = (sum(x) + 3 for x in lengths) if packed else case.sizes
    rows = ((s_q,), (s_kv,)) if packed else ((batch, s_q), (batch, s_kv))
    d, d_v = case.dims
    shapes = (*rows[0], heads, d), (*rows[1], heads_kv, d), (*rows[1], heads_kv, d_v)
    made = (oracle.randn(*x, dtype=torch.float32, seed=seed + i) for i, x in enumerate(shapes))
    q, k, v = (fp8.quantise(x, DTYPES[case.dtype], None) for x in made)
    d_o = oracle.randn(*rows[0], heads, d_v, dtype=torch.float32, seed=seed + 3)
    arguments: dict[str, Any] = {
        **dict(layout=case.layout, mask=case.mask, window=case.window, softmax=case.softmax),
        **dict(bottom_right=case.bottom_right or None, softcap=case.softcap),
        **{name: scale(x) for name, x in UNITS.items()},
    }
    names = ("cu_seqlens_q", "cu_seqlens_kv") if packed else ("seqused_q", "seqused_kv")
    for name, side in zip(names, lengths, strict=False):
        values = torch.tensor(side, dtype=torch.int32, device=oracle.DEVICE)
        ends = torch.nn.functional.pad(values.cumsum(0), (1, 0)).int()
        arguments[name] = ends if packed else values
    if case.alibi:
        arguments["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0625][:heads]).to(q.device)
    if case.bias:
        longest = tuple(map(max, lengths)) if packed else case.sizes
        full = (len(lengths[0]) if packed else batch, heads, *longest)
        made_bias = oracle.randn(*sizes_of(case.bias, full), dtype=torch.float32, seed=seed + 6)
        arguments["bias"] = made_bias.bfloat16()
    if lowest:
        arguments["bias"][..., 70:80] = float("-inf")
        arguments["bias"][..., 5, :] = torch.finfo(torch.bfloat16).min
        d_o[:, 5] = 0.0
    if case.attn_mask:
        arguments["attn_mask"] = random_mask(case.attn_mask, case.heads, case.sizes)
    if case.dropout:
        state = torch.tensor([1234, 5], device=q.device)
        arguments |= {"dropout_p": case.dropout, "rng_state": state}
    if case.softmax == "learnable":
        arguments["sink"] = oracle.randn(heads, dtype=torch.float32, seed=seed + 4)
    plainly = {n: x for n, x in arguments.items() if not n.startswith("descale")}
    exact = [x.double() * UNITS[f"descale_{n}"] for n, x in zip("qkv", (q, k, v), strict=True)]
    out, aux = reference.attention(*exact, return_lse=True, **plainly)
    assert aux.lse is not None
    if case.scale_s is not None:
        arguments |= {"scale_s": scale(case.scale_s), "descale_s": scale(1 / case.scale_s)}
    stored = case.o in ("e4m3", "e5m2")
    o = fp8.quantise(out.float(), DTYPES[case.o], 4.0) if stored else out.to(DTYPES[case.o])
    units = {"scale_dq": 16.0, "scale_dk": 8.0, "scale_dv": 32.0}
    backward = BackwardOperands(
        d_o=fp8.quantise(d_o, DTYPES[case.d_o], 4.0),
        o=o,
        lse=aux.lse.float().contiguous(),
        dlse=oracle.randn(*aux.lse.shape, dtype=torch.float32, seed=5) if case.dlse else None,
        descale_o=scale(0.25) if stored else None,
        descale_do=scale(0.25),
        scale_dp=scale(64.0),
        descale_dp=scale(1 / 64),
        dtype=DTYPES[case.grad],
        **({n: scale(x) for n, x in units.items()} if case.grad in ("e4m3", "e5m2") else {}),
    )
    return Given(case, q, k, v, backward, arguments)


def unscaled(x: Tensor, by: Tensor | None) -> Tensor:
    """Numbers that stored ones stand for, in float64."""
    return x.double() if by is None else x.double() / by.double()


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def check(made: Given, found: dict[str, Tensor]) -> None:
    """Asserts the rule of this module."""
    exact, defined = made.defined(True), made.defined(False)
    for name in NAMES:
        by = getattr(made.backward, f"scale_{name}")
        got, truth = unscaled(found[name], by), getattr(exact, name)
        emulated = unscaled(getattr(defined, name), by)
        assert not got.isnan().any(), name
        error, own, size = map(rms, (got - truth, emulated - truth, truth))
        rounding = torch.finfo(DTYPES[made.case.grad]).eps / 4  # of what is stored once more
        limit = 1.1 * own + (1e-3 + rounding) * size + CANCELLED
        assert error <= limit, f"{name}: {error:.3e} beside {own:.3e}"
        largest = oracle.largest((got - truth).abs())
        limit = 2 * oracle.largest((emulated - truth).abs())
        limit += (1e-3 + 2 * rounding) * oracle.largest(truth.abs()) + CANCELLED
        assert largest <= limit, f"{name}: {largest:.3e} > {limit:.3e}"
        assert abs(float(found[f"amax_{name}"] - getattr(defined, f"amax_{name}"))) <= limit, name
    wanted = float(defined.amax_dp)
    assert abs(float(found["amax_dp"]) - wanted) <= 0.02 * wanted + CANCELLED
    if (dsink := defined.learned.get("dsink")) is not None:
        difference = oracle.largest((found["dsink"].double() - dsink).abs())
        assert difference <= 2e-3 * oracle.largest(dsink.abs()) + 1e-4
    if (dbias := exact.learned.get("dbias")) is not None:  # of numbers that nothing stores
        assert found["dbias"].shape == dbias.shape and found["dbias"].dtype == torch.bfloat16
        error = rms(found["dbias"].double() - dbias)
        assert error <= 4e-3 * rms(dbias) + CANCELLED, f"dbias: {error:.3e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_as_defined(case: Case) -> None:
    made = given(case)
    check(made, made.run())


@pytest.mark.parametrize("case", [CASES[4], CASES[7]], ids=str)
def test_deterministic_gradients_have_the_same_bits(case: Case) -> None:
    made = given(case)
    first, second = made.run(), made.run()
    assert oracle.same((first[n].float() for n in NAMES), (second[n].float() for n in NAMES))


def test_gradients_without_maxima_are_the_same() -> None:
    made = given(Case(grad="e5m2", deterministic=True))
    found, plain = made.run(), made.run(amax=False)
    assert all(torch.equal(found[n].float(), plain[n].float()) for n in NAMES)
    assert all(plain[name].shape == (0,) for name in MAXIMA)


EXTREME = [
    *itertools.product(("descale_do", "scale_dp", "descale_dp"), (0.0, 1e-42, 2.0**-120)),
    ("scale_dp", 2.0**120),
]


@pytest.mark.parametrize(("name", "value"), EXTREME)
def test_extreme_scales_give_finite_gradients(name: str, value: float) -> None:
    made = given(Case(mask="causal"))
    found = made.run(**{name: scale(value)})
    assert all(found[n].float().isfinite().all() for n in NAMES)
    if value == 0 and name == "descale_dp":
        assert not found["dq"].any() and not found["dk"].any() and found["dv"].any()


def test_scale_of_nothing_still_measures_dp() -> None:
    """A scale of 0 stores no gradient of a score, and its maximum is what the next one is of."""
    made = given(Case(mask="causal"))
    wanted = made.run()["amax_dp"]
    found = made.run(scale_dp=scale(0.0))
    assert not found["dq"].any() and not found["dk"].any()
    torch.testing.assert_close(found["amax_dp"], wanted, rtol=1e-5, atol=0)


def test_no_sequences_give_no_gradients() -> None:
    made = given(Case(heads=(1, 2, 2), sizes=(64, 64)))
    empty = Given(
        made.case,
        *(x[:0] for x in (made.q, made.k, made.v)),
        replace(made.backward, d_o=made.backward.d_o[:0], o=made.backward.o[:0],
                lse=made.backward.lse[:0]),
        made.arguments,
    )  # fmt: skip
    found = empty.run()
    assert found["dq"].shape == (0, 64, 2, 128) and float(found["amax_dq"]) == 0


def test_every_fault_is_named_at_once() -> None:
    made = given(Case())
    other = torch.zeros(2, device=oracle.DEVICE)
    with pytest.raises(SpecError) as raised:
        made.run(
            scale_dp=None, descale_do=other, descale_o=scale(1.0), scale_dk=scale(2.0),
            dlse=made.backward.lse.double(),
        )  # fmt: skip
    text = str(raised.value)
    for part in (
        "scale_dp and descale_dp are needed",
        "descale_do needs float32 [1]",
        "descale_o belongs to an output in 8 bits",
        "scale_dk scales a gradient in 8 bits",
        "dlse needs float32",
    ):
        assert part in text, part
