"""Sequences over several devices: gathered and around a ring, in every order, as one call."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from attngen.jax import (  # noqa: E402
    CPStrategy,
    DelayedScaling,
    Float8CurrentScaling,
    Float8Scales,
    attention,
    context_attention,
    fp8_attention,
)
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from attngen import SpecError  # noqa: E402
from attngen.call.context.order import Order  # noqa: E402

jnp = jax.numpy
HEADS, HEADS_KV, DIM = 4, 2, 8
RING, GATHER = CPStrategy.RING, CPStrategy.ALL_GATHER
DROPPED = {"mask": "causal", "dropout_p": 0.3, "alibi_slopes": True}
FP8 = Float8CurrentScaling()
STATE = np.array([11, 0, 12, 0], np.uint32)


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


@dataclass(frozen=True)
class Case:
    """A call: how it is spread, and what it says. lengths: of packed sequences, or one of a dense
    batch; learned: of the operands beside q, k and v."""

    strategy: CPStrategy
    order: Any = "dual_chunk"
    devices: int = 2
    lengths: tuple[int, ...] = (24,)
    given: dict[str, Any] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    dtype: str = "float64"
    recipe: Any = None  # by which operands have 8 bits

    def __str__(self) -> str:
        words = [self.strategy.name, str(self.order), *map(str, self.lengths), self.dtype]
        words += ["fp8"] * (self.recipe is not None)
        return "-".join([*words, *(f"{k}={v}" for k, v in self.given.items()), *self.learned])

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    @property
    def places(self) -> list[int]:
        """The tokens that devices hold, one device behind the other."""
        name, stripe = (self.order, 1) if isinstance(self.order, str) else self.order
        order = Order(name, self.devices, stripe)
        return sum((order.shard(rank, self.lengths) for rank in range(self.devices)), [])

    def arrays(self) -> dict[str, Any]:
        """Operands of the whole that are arrays, by their names."""
        tokens = sum(self.lengths)
        outer = (tokens,) if self.packed else (2, tokens)
        dims = (DIM, DIM + 4) if self.recipe is None else (16, 32)  # of 8 bits 16 bytes at once
        sizes = [*zip((HEADS, HEADS_KV, HEADS_KV), (dims[0], *dims), strict=True)]
        found = {
            name: random(*outer, *size, seed=seed)
            for seed, (name, size) in enumerate(zip("qkv", sizes, strict=True))
        }
        if "sink" in self.learned:
            found["sink"] = random(HEADS, seed=8)
        if "bias" in self.learned:
            found["bias"] = random(1, HEADS, tokens, tokens, seed=9)
        if "seqused" in self.given:
            used = np.array(self.given["seqused"], np.int32)
            found |= {"seqused_q": used, "seqused_kv": used}
        floats = {name for name, x in found.items() if x.dtype == np.float64}
        return {n: jnp.asarray(x, self.dtype if n in floats else None) for n, x in found.items()}

    def words(self) -> dict[str, Any]:
        """Everything else that the call says."""
        found = {name: x for name, x in self.given.items() if name != "seqused"}
        if self.packed:
            ends = np.array([*accumulate(self.lengths, initial=0)], np.int32)
            found |= {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        if "dropout_p" in found:
            found["rng_state"] = STATE
        return found | ({"softmax": "learnable"} if "sink" in self.learned else {})

    def spread(self, arrays: dict[str, Any]) -> Any:
        """Output and LSE by devices, in the order of the whole."""
        dim = 0 if self.packed else 1
        rows = PartitionSpec(*[None] * dim, "cp")
        axes = {"q": dim, "k": dim, "v": dim, "bias": 2}
        specs = {name: PartitionSpec() for name in arrays}
        specs |= {**dict.fromkeys("qkv", rows), "bias": PartitionSpec(None, None, "cp")}
        places, back = np.array(self.places), np.argsort(self.places)
        held = {n: jnp.take(x, places, axes[n]) if n in axes else x for n, x in arrays.items()}
        run = jax.shard_map(
            partial(self.on_device, axis="cp"),
            mesh=Mesh(np.array(jax.devices()[: self.devices]), "cp"),
            in_specs=({name: specs[name] for name in held},),
            out_specs=(rows, PartitionSpec(*[None] * (dim + 1), "cp")),
        )
        out, lse = run(held)
        return jnp.take(out, back, dim), jnp.take(lse, back, lse.ndim - 1)

    def on_device(self, arrays: dict[str, Any], axis: str) -> Any:
        words = {"axis": axis, "strategy": self.strategy, "order": self.order, **self.words()}
        words |= {"recipe": self.recipe}
        out, aux = context_attention(**arrays, **words, return_lse=True)
        return out, aux.lse

    def whole(self, arrays: dict[str, Any]) -> Any:
        """Output and LSE by one call."""
        if self.recipe is None:
            out, aux = attention(**arrays, **self.words(), return_lse=True)
        else:
            words = {**self.words(), "recipe": self.recipe}
            out, aux = fp8_attention(**arrays, **words, return_lse=True)
        return out, aux.lse

    def results(self, function: Any) -> list[np.ndarray]:
        """Output, LSE and gradients."""
        arrays = self.arrays()
        learned = ("q", "k", "v", *self.learned)

        def loss(values: dict[str, Any]) -> Any:
            out, lse = function({**arrays, **values})
            seen = jnp.where(lse > -jnp.inf, lse, 0)
            wide = out.astype(lse.dtype)
            return (wide**2).sum() + (seen**2).sum(), (out, lse)

        values = {name: arrays[name] for name in learned}
        made, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(values)
        return [np.asarray(x.astype(float)) for x in (out, lse, *map(made.__getitem__, learned))]


CASES = [
    Case(RING, devices=3, given={"mask": "causal"}, learned=("sink",)),
    Case(RING, "contiguous", 3, given={"window": (5, 2)}),
    Case(RING, "striped", given={"mask": "causal", "softcap": 2.0}),
    Case(RING, "contiguous", given=DROPPED, learned=("bias",)),
    Case(RING, lengths=(8, 4), given={"mask": "causal_bottom_right", "window": (6, 0)}),
    Case(RING, "contiguous", given={"mask": "padding_causal", "seqused": (19, 7)}),
    Case(RING, "contiguous", given={"mask": "causal"}, dtype="bfloat16"),
    Case(GATHER, "contiguous", given={"window": (7, 0), **DROPPED}, learned=("bias", "sink")),
    Case(GATHER, lengths=(12, 20), given={"mask": "causal"}),
    Case(GATHER, "contiguous", given={"seqused": (19, 24), "softmax": "off_by_one"}),
    Case(RING, given={"mask": "causal"}, dtype="bfloat16", recipe=FP8, learned=("sink",)),
    Case(GATHER, given={"seqused": (19, 7)}, dtype="float16", recipe=FP8),
    Case(RING, lengths=(8, 16), given={"mask": "causal"}, dtype="bfloat16", recipe=FP8),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_devices_are_one_call(case: Case) -> None:
    with jax.enable_x64(True):
        pairs = zip(case.results(case.spread), case.results(case.whole), strict=True)
        for found, wanted in pairs:
            finite = np.isfinite(wanted)
            assert np.array_equal(found[~finite], wanted[~finite])
            error = np.abs(found[finite] - wanted[finite]).max()
            relative = 1e-12 if case.dtype == "float64" else 0.02 if case.recipe is None else 0.04
            assert error <= relative * np.abs(wanted[finite]).max()


def test_a_ring_sends_what_is_seen() -> None:
    """Under a window one neighbour's halo travels, and its gradient back."""
    given = {"mask": "causal", "window": (5, 0)}
    case = Case(RING, "contiguous", 4, (64,), given, dtype="float32")
    arrays = case.arrays()

    def loss(values: dict[str, Any]) -> Any:
        return sum(x.sum() for x in case.spread({**arrays, **values}))

    text = jax.jit(jax.grad(loss)).lower(arrays).as_text()
    sent = re.findall(r"collective_permute.*?\(tensor<([\dx]+)x\w+>\)", text)
    assert {int(each.split("x")[1]) for each in sent} == {5}
    assert len(sent) == 6  # k and v, again in the backward, and their gradients


def test_operands_in_8_bits_travel_as_these() -> None:
    """By scales of all devices, and gradients in float32; a device whose numbers are small uses
    that of the others."""
    case = Case(RING, "contiguous", given={"mask": "causal"}, dtype="bfloat16", recipe=FP8)
    arrays = case.arrays()
    loss = jax.jit(jax.grad(lambda values: case.spread(values)[0].astype("float32").sum()))
    text = loss.lower(arrays).as_text()
    sent = re.findall(r"collective_permute.*?\(tensor<[\dx]+x(\w+)>\)", text)
    assert {*sent} == {"ui8", "f32"} and sent.count("ui8") == 4
    small = jnp.arange(24)[None, :, None, None] < 12
    arrays["v"] = jnp.where(small, arrays["v"] / 1024, arrays["v"])
    outs = [jax.jit(function)(arrays)[0] for function in (case.spread, case.whole)]
    found, wanted = (np.asarray(x.astype(float)) for x in outs)
    assert np.abs(found - wanted)[:, :12].max() <= 0.04 * np.abs(wanted[:, :12]).max()


@pytest.mark.slow
def test_delayed_scales_are_those_of_one_call() -> None:
    """Twice: by an own magnitude before there is a history, and by the largest of all devices."""
    recipe = DelayedScaling(amax_history_len=2)
    case = Case(RING, dtype="bfloat16", recipe=recipe)
    arrays = case.arrays()
    rows, places = PartitionSpec(None, "cp"), np.array(case.places)
    words = {"recipe": recipe, "mask": "causal"}

    def over(scales: Any, held: dict[str, Any]) -> Any:
        axis = {"axis": "cp", "strategy": RING}
        out, noted = context_attention(**held, **words, **axis, scales=scales)
        return out, noted.end_step(recipe)

    def step(scales: Any) -> Any:
        mesh = Mesh(np.array(jax.devices()[:2]), "cp")
        whole = PartitionSpec()
        run = jax.shard_map(over, mesh=mesh, in_specs=(whole, rows), out_specs=(rows, whole))
        return run(scales, {n: jnp.take(x, places, 1) for n, x in arrays.items()})

    found = wanted = Float8Scales.begin(recipe)
    for _ in range(2):
        out, found = jax.jit(step)(found)
        one, noted = fp8_attention(**arrays, **words, scales=wanted)
        wanted = noted.end_step(recipe)
        assert all(jnp.array_equal(x, y) for x, y in zip(found, wanted, strict=True))
        out = jnp.take(out, np.argsort(places), 1)
        error = jnp.abs(out.astype("float32") - one.astype("float32")).max()
        assert error <= 0.04 * jnp.abs(one).max()
        arrays["v"] = arrays["v"] * 4


def test_recipes_that_calls_over_devices_have_not() -> None:
    arrays = Case(RING, dtype="float32").arrays()
    with pytest.raises(SpecError) as caught:
        context_attention(**arrays, axis="cp", recipe=Float8CurrentScaling(backward="fp8"))
    assert len(caught.value.reasons) == 2
    with pytest.raises(SpecError, match="needs a Float8CurrentScaling or a .*; got str"):
        context_attention(**arrays, axis="cp", recipe="delayed")
    arrays = {name: x.astype("bfloat16") for name, x in arrays.items()}
    with pytest.raises(SpecError, match="DelayedScaling needs scales"):
        context_attention(**arrays, axis="cp", recipe=DelayedScaling())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "axis='cp' is no axis of a jax.shard_map around this call"),
        ({"mask": "prefix"}, "it is a plain one"),
        ({"score_mod": "temperature"}, "score_mod is not served over several devices"),
        ({"mask": "causal_bottom_right", "seqused_q": np.array([3])}, "pass cu_seqlens_"),
        ({"layout": "thd"}, "in thd have 3 axes"),
        ({"dropout_p": 0.5}, "needs rng_state"),
        ({"softmax": "learnable"}, "needs sink"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x,
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    arrays = Case(RING, dtype="float32").arrays()
    with pytest.raises(SpecError, match=re.escape(says)):
        context_attention(**arrays, axis="cp", **options)
