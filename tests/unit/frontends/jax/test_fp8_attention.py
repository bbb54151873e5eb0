"""`fp8_attention` against the recipes of `attngen.fp8`: both store the same numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

from attngen.jax import (  # noqa: E402
    DelayedScaling,
    Float8CurrentScaling,
    Float8Scales,
    fp8_attention,
)

import attngen  # noqa: E402
from attngen import SpecError, fp8  # noqa: E402
from attngen.frontends.jax.context_storage import check_recipe  # noqa: E402
from tests.support import launch_kit  # noqa: E402
from tests.support.jax_kit import random  # noqa: E402

jnp = jax.numpy
Q, KV = random(2, 40, 4, 32), random(2, 56, 2, 32)
ENDS = np.array([0, 13, 13, 45], np.int32)
CASES: dict[str, dict[str, Any]] = {
    "groups": {"q": Q, "k": KV, "v": random(2, 56, 2, 16)},
    "sink": {"q": Q, "k": Q, "v": Q, "mask": "causal", "softmax": "learnable", "sink": random(4)},
    "packed with each other": {"q": Q, "k": random(2, 56, 2, 2, 32), "layout": "bshd_bs2hd"},
    "tokens": {
        **{name: random(50, 4, 32) for name in "qkv"},
        "layout": "thd",
        "mask": "causal",
        "cu_seqlens_q": ENDS,
        "cu_seqlens_kv": ENDS,
    },
    "heads first, lengths": {
        **{name: random(2, 4, 40, 32) for name in "qkv"},
        "layout": "bhsd",
        "seqused_q": np.array([17, 40], np.int32),
        "seqused_kv": np.array([40, 0], np.int32),
    },
    "dropout, e4m3": {"q": Q, "k": KV, "v": KV, "dropout_p": 0.25, "rng_state": (5, 7)},
}
LEARNED = ("q", "k", "v", "sink")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name, backward, scaling",
    [
        *((name, "fp8", "tensor") for name in CASES),
        *(("groups", "16", "tensor"), ("tokens", "16", "tensor")),
        *((name, "16", "token") for name in CASES),
    ],
)
def test_results_and_gradients_are_those_of_torch(name: str, backward: str, scaling: str) -> None:
    case = CASES[name]
    kind = "E4M3" if "dropout_p" in case else "HYBRID"
    words = {n: x for n, x in case.items() if isinstance(x, (str, float))}
    arrays = {n: x for n, x in case.items() if n not in words and n != "rng_state"}
    learned = [name for name in LEARNED if name in arrays]

    tensors = {n: torch.tensor(x) for n, x in arrays.items()}
    tensors |= {n: tensors[n].bfloat16() for n in "qkv" if n in tensors}
    if "sink" in tensors:
        tensors["sink"] = tensors["sink"].float()
    leaves = [tensors[name].requires_grad_() for name in learned]
    state = {"rng_state": torch.tensor(case["rng_state"])} if "rng_state" in case else {}
    recipe = fp8.Float8CurrentScaling(
        fp8_format=fp8.Format[kind], backward=backward, scaling=scaling
    )
    with fp8.autocast(recipe=recipe):
        out, aux = attngen.attention(
            **tensors, **state, **words, return_lse=True, backend="reference"
        )
    rows = torch.where(aux.lse.isfinite(), aux.lse, 0)
    wanted = torch.autograd.grad(out.float().square().sum() + rows.sum(), leaves)

    given = {n: jnp.asarray(x) for n, x in arrays.items()}
    given |= {n: given[n].astype(jnp.bfloat16) for n in "qkv" if n in given}
    state = {"rng_state": case["rng_state"]} if "rng_state" in case else {}

    def loss(values: dict[str, Any]) -> Any:
        out, aux = fp8_attention(
            **{**given, **values}, **state, **words, return_lse=True,
            recipe=Float8CurrentScaling(fp8_format=kind, backward=backward, scaling=scaling),
        )  # fmt: skip
        rows = jnp.where(aux.lse > -jnp.inf, aux.lse, 0)
        return (out.astype(jnp.float32) ** 2).sum() + rows.sum(), (out, aux.lse)

    values = {name: given[name] for name in learned}
    found, (got, lse) = jax.jit(jax.grad(loss, has_aux=True))(values)
    close(got, out, 4e-3)
    assert np.allclose(np.asarray(lse), aux.lse.detach().numpy(), atol=2e-6)
    for name, exact in zip(learned, wanted, strict=True):
        close(found[name], exact, 8e-3)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_delayed_scales_move_as_those_of_a_layer(algo: str) -> None:
    """Three steps of growing numbers: state in, state out, and dO's magnitudes by its gradient."""
    words = {"amax_history_len": 2, "amax_compute_algo": algo, "margin": 1, "backward": "fp8"}
    layer = fp8.Attention(amax_history_len=2)
    theirs, recipe = fp8.DelayedScaling(**words), DelayedScaling(**words)
    scales = Float8Scales.begin(recipe)

    @jax.jit
    def step(scales: Float8Scales, *carriers: Any) -> Any:
        def loss(scales: Float8Scales, *carriers: Any) -> Any:
            out, noted = fp8_attention(
                *carriers, mask="causal", recipe=recipe, scales=scales, backend="reference"
            )
            return (out.astype(jnp.float32) ** 2).sum(), (out, noted)

        (found, _), (out, noted) = jax.grad(loss, (0, 1), has_aux=True)(scales, *carriers)
        return out, noted.with_gradients(found).end_step(recipe)

    for factor in (4.0, 1.0, 0.5):
        carriers = [torch.tensor(x * factor).bfloat16() for x in (Q, KV, 2 * KV)]
        for x in carriers:
            x.requires_grad_()
        with fp8.autocast(recipe=theirs):
            wanted = layer(*carriers, mask="causal", backend="reference")
            wanted.float().square().sum().backward()
        given = (jnp.asarray(x.detach().float().numpy()).astype(jnp.bfloat16) for x in carriers)
        out, scales = step(scales, *given)
        close(out, wanted, 4e-3)
        assert np.array_equal(scales.scale, layer.scales.scale)
        assert np.array_equal(scales.amax_history, layer.scales.amax_history)
        of_d_o = layer.scales.gradient_scale[:1], layer.scales.gradient_history[:, :1]
        assert np.allclose(scales.gradient_scale, of_d_o[0], rtol=2**-6)
        assert np.allclose(scales.gradient_history, of_d_o[1], rtol=2**-6)


def test_devices_share_maxima_and_states_are_refused() -> None:
    recipe, q = DelayedScaling(amax_history_len=2), jnp.asarray(Q).astype(jnp.bfloat16)
    state = Float8Scales.begin(recipe)
    noted = jax.vmap(lambda x: state.noted(x))(jnp.asarray([[1.0, 2.0, 3.0], [4.0, 1.0, 1.0]]))
    moved = jax.vmap(lambda x: x.end_step(recipe, "data"), axis_name="data")(noted)
    assert np.allclose(moved.scale, [[112, 224, 448 / 3]] * 2)
    of_gradients = DelayedScaling(amax_history_len=2, backward="fp8")
    x = jnp.asarray(random(2, 16, 2, 16) * np.array([1, 3])[:, None, None, None]).astype("bfloat16")

    @jax.jit
    def largest(x: Any, state: Any) -> Any:
        def loss(x: Any, state: Any) -> Any:
            out, _ = fp8_attention(x, x, x, recipe=of_gradients, scales=state)
            return (out.astype(jnp.float32) ** 2).sum()

        _, found = jax.grad(loss, (0, 1))(x, state)
        return found.gradient_history

    everywhere = jax.sharding.PartitionSpec()
    specs = {"in_specs": (jax.sharding.PartitionSpec("data"), everywhere), "out_specs": everywhere}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    shared = jax.jit(jax.shard_map(largest, mesh=mesh, **specs))(x, state)
    assert np.array_equal(shared, np.maximum(*(largest(x[n : n + 1], state) for n in range(2))))
    for words, reason in (
        ({"recipe": recipe}, "Begin with Float8Scales.begin"),
        ({"scales": state}, "belong to a DelayedScaling"),
        ({"recipe": DelayedScaling(), "scales": state}, "scales keep 2 steps, the recipe 1024"),
    ):
        with pytest.raises(SpecError, match=reason):
            fp8_attention(q, q, q, **words)
    with pytest.raises(SpecError) as caught:
        DelayedScaling(margin=99, amax_history_len=0, amax_compute_algo="mean", backward="8")
    assert len(caught.value.reasons) == 4


def close(found: Any, wanted: torch.Tensor, limit: float) -> None:
    """Raises: AssertionError where they differ by more than that of the root mean square: a weight
    near a boundary may be stored as its neighbour."""
    assert found.dtype.name == str(wanted.dtype).removeprefix("torch.")
    one, other = np.asarray(found.astype("float32")), wanted.detach().float().numpy()
    assert one.shape == other.shape
    assert np.sqrt(((one - other) ** 2).mean()) <= limit * np.sqrt((other**2).mean())


@pytest.mark.slow
def test_elements_that_are_mapped_have_scales_of_their_own() -> None:
    x = jnp.asarray(random(2, 1, 16, 2, 16)).astype(jnp.bfloat16)
    x = x * jnp.asarray([1.0, 1000.0], jnp.bfloat16)[:, None, None, None, None]

    def gradient(q: Any) -> Any:
        recipe = Float8CurrentScaling(backward="fp8")
        return jax.grad(lambda q: (fp8_attention(q, q, q, recipe=recipe) ** 2).sum())(q)

    mapped = jax.vmap(gradient)(x)
    assert all(jnp.array_equal(mapped[n], gradient(x[n])) for n in range(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backward", ["fp8", "16"])
def test_keys_that_every_device_has_have_sums_of_gradients(backward: str) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    data, everywhere = (jax.sharding.PartitionSpec(*axes) for axes in (("data",), ()))
    q, k, v = (jnp.asarray(x).astype(jnp.bfloat16) for x in (Q, KV[:1], KV[1:]))
    recipe = Float8CurrentScaling(backward=backward)

    @jax.jit
    def gradients(q: Any, k: Any, v: Any) -> Any:
        def loss(*given: Any) -> Any:
            return (fp8_attention(*given, recipe=recipe) ** 2).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    specs = data, everywhere, everywhere
    local = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs))
    found, each = local(q, k, v), [gradients(q[n : n + 1], k, v) for n in range(2)]
    assert jnp.array_equal(found[0], jnp.concatenate([dq for dq, *_ in each]))
    for got, one, other in zip(found[1:], *(parts[1:] for parts in each), strict=True):
        assert jnp.allclose(got.astype("float32"), (one + other).astype("float32"), rtol=2**-7)


@pytest.mark.parametrize("backward", ["fp8", "16"])
def test_second_derivatives_are_refused(backward: str) -> None:
    """They would be 0: numbers in 8 bits are no function of q."""
    q, recipe = jnp.asarray(Q).astype(jnp.bfloat16), Float8CurrentScaling(backward=backward)

    def gradient(q: Any) -> Any:
        return jax.grad(lambda q: (fp8_attention(q, q, q, recipe=recipe) ** 2).sum())(q)

    with pytest.raises(SpecError, match="no second derivative"):
        jax.grad(lambda q: gradient(q).sum())(q)
    with pytest.raises(SpecError, match="none in forward mode"):
        jax.jvp(gradient, (q,), (q,))


def test_program_for_cuda_has_a_forward_and_a_backward_in_8_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attngen.call.kernel_choice.find_kernels", launch_kit.find_kernels)
    monkeypatch.setattr("attngen.call.kernel_choice._kernels", {})
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)

    def step(q: Any, backward: str) -> Any:
        recipe = Float8CurrentScaling(backward=backward)
        return jax.grad(lambda q: fp8_attention(q, q, q, recipe=recipe).sum())(q)

    for backward in ("fp8", "16"):
        lowered = jax.jit(step, static_argnums=1).trace(x, backward)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        calls = [line for line in text.splitlines() if "custom_call @attngen" in line]
        assert len(calls) == 2
        assert sum(line.count("f8E4M3FN") for line in calls) >= 3
        assert ("f8E5M2" in calls[-1]) is (backward == "fp8")


def test_calls_that_have_no_fp8_are_refused_with_all_reasons() -> None:
    q = jnp.asarray(Q).astype(jnp.bfloat16)
    with pytest.raises(SpecError) as caught:
        fp8_attention(q, jnp.asarray(Q), "v", descale_q=jnp.ones(1), out_dtype=jnp.float32)
    assert len(caught.value.reasons) == 4
    with pytest.raises(SpecError) as caught:
        Float8CurrentScaling(fp8_format="E3M4", backward="8", amax_epsilon=-1.0)
    assert len(caught.value.reasons) == 3
    with pytest.raises(SpecError) as caught:
        fp8_attention(q, q, q, out_dtype="float", recipe=fp8.Float8CurrentScaling())
    assert len(caught.value.reasons) == 2


def test_gradients_that_kernels_have_none_of_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ["no backward in 8 bits"]
    monkeypatch.setattr("attngen.call.routing.backward_refusals", lambda *_: reasons)
    x = jnp.zeros((1, 16, 2, 64), jnp.bfloat16)
    with pytest.raises(SpecError, match="no backward in 8 bits. Take a recipe with .*fp8_or_16"):
        fp8_attention(x, x, x, recipe=Float8CurrentScaling(backward="fp8"))
    mixed = Float8CurrentScaling(backward="fp8_or_16")
    assert fp8_attention(x, x, x, recipe=mixed).shape == x.shape


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"k": None}, "needs k"),
        ({"seqused_kv": np.array([1, 2, 3], np.int32)}, "seqused_kv needs int32"),
        ({"q": jnp.zeros((16, 2, 32), jnp.bfloat16), "seqused_q": np.ones(2, np.int32)}, "needs q"),
        ({"layout": "thd", "cu_seqlens_q": np.array([0, 4], np.int32)}, "shape"),
    ],
    ids=["no keys", "lengths of others", "an axis less", "not packed"],
)
def test_operands_are_refused_before_scales_are_made_of_them(given: Any, reason: str) -> None:
    q = jnp.asarray(Q).astype(jnp.bfloat16)
    with pytest.raises(SpecError, match=reason):
        fp8_attention(**{"q": q, "k": q, "v": q, **given})


def test_scales_of_tokens_are_folded_and_refused_over_an_axis() -> None:
    recipe = Float8CurrentScaling(scaling="token")
    q, kv = (jnp.asarray(np.stack([x, 3 * x])).astype(jnp.bfloat16) for x in (Q, KV))
    attend = partial(fp8_attention, recipe=recipe, mask="causal", backend="reference")
    mapped = jax.vmap(attend)(q, kv, kv)
    assert all(np.array_equal(mapped[i], attend(q[i], kv[i], kv[i])) for i in range(2))
    with pytest.raises(SpecError, match="scaling='tensor'"):
        check_recipe(recipe, None, q)


def test_suffix_of_tokens_leaves_a_prefix_alone() -> None:
    recipe = Float8CurrentScaling(scaling="token")
    far = np.arange(40)[:, None, None] >= 23
    outs = [
        fp8_attention(
            *(jnp.asarray(np.where(far, x * factor, x)).astype(jnp.bfloat16) for x in (Q, Q, Q)),
            recipe=recipe, mask="causal", backend="reference",
        )
        for factor in (1.0, 90.0)
    ]  # fmt: skip
    before, after = (np.asarray(x.astype(jnp.float32)) for x in outs)
    assert np.array_equal(before[:, :23], after[:, :23]) and not np.array_equal(before, after)


@pytest.mark.parametrize(
    "fields, reason",
    [({"scaling": "row"}, "scaling needs"), ({"scaling": "token", "backward": "fp8"}, "16 bits")],
)
def test_recipes_of_token_scales_that_mean_nothing_are_refused(
    fields: dict[str, str], reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        Float8CurrentScaling(**fields)
