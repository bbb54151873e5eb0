"""JAX's transformations: mapped calls are one, sharded ones stay apart, saved ones are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from attngen.jax import attention  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from attngen import register_fragment  # noqa: E402
from tests.support import launch_kit  # noqa: E402
from tests.support.own_fragments import kept  # noqa: E402
from tests.unit.fragments.test_calls import SCORE, write  # noqa: E402

jnp = jax.numpy


def random(*shape: int, seed: int = 0) -> Any:
    numbers = np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)
    return jnp.asarray(numbers).astype(jnp.bfloat16)


def results(function: Callable[..., Any]) -> Callable[..., Any]:
    """Output, LSE, and gradients of the sum of squares of the one and of the other."""

    def run(*arrays: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            out, aux = function(*arrays)
            rows = jnp.where(aux.lse > -jnp.inf, aux.lse, 0)
            return (out.astype(jnp.float32) ** 2).sum() + rows.sum(), (out, aux.lse)

        places = [n for n, x in enumerate(arrays) if x.dtype == jnp.bfloat16]
        gradients, found = jax.grad(loss, argnums=places, has_aux=True)(*arrays)
        return (*found, *gradients)

    return run


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        x, y = (np.asarray(each.astype(jnp.float32)) for each in (one, other))
        assert x.shape == y.shape and np.array_equal(np.isfinite(x), np.isfinite(y))
        finite = np.isfinite(y)
        assert np.abs(x[finite] - y[finite]).max() <= 0.01 * np.abs(y[finite]).max()


def calls_in(jaxpr: Any, of_gradients: bool) -> Iterator[Any]:
    """Operations of a program, those of forwards or of gradients."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "attngen":
            if (equation.params["form"].wanted is not None) == of_gradients:
                yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr"):
                    inner = inner.jaxpr
                if hasattr(inner, "eqns"):
                    yield from calls_in(inner, of_gradients)


def with_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return attention(q, k, v, bias=bias, mask="causal", return_lse=True)


def packed(q: Any, k: Any, v: Any, ends: Any) -> Any:
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return attention(q, k, v, layout="thd", **lengths, return_lse=True)


MAPPED = {
    "bias for all": (
        *(with_bias, (0, None, 1, None)),
        (random(3, 2, 7, 4, 8), random(2, 7, 2, 8), random(2, 3, 7, 2, 8), random(1, 4, 7, 7)),
    ),
    "packed": (
        *(packed, (0, 0, None, 0)),
        (
            *(random(3, 10, 4, 8), random(3, 10, 2, 8), random(10, 2, 8)),
            jnp.asarray([[0, 4, 9], [1, 1, 10], [0, 2, 3]], jnp.int32),
        ),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("function", "axes", "arrays"), MAPPED.values(), ids=MAPPED)
def test_mapped_call_gives_what_calls_one_after_another_do(
    function: Any, axes: tuple[Any, ...], arrays: tuple[Any, ...]
) -> None:
    run = jax.jit(results(function))
    mapped = jax.vmap(results(function), axes)
    pairs = [*zip(arrays, axes, strict=True)]
    (size, *_) = [x.shape[axis] for x, axis in pairs if axis is not None]
    elements = [
        run(*[x if axis is None else jnp.take(x, n, axis=axis) for x, axis in pairs])
        for n in range(size)
    ]
    close(jax.jit(mapped)(*arrays), [jnp.stack(x) for x in zip(*elements, strict=True)])
    counts = [len([*calls_in(jax.make_jaxpr(mapped)(*arrays).jaxpr, x)]) for x in (False, True)]
    assert counts == [1, 1]


def test_mapped_dropout_has_the_same_bits_for_each_element() -> None:
    q = random(2, 1, 7, 2, 8)
    drop = jax.jit(lambda q: attention(q, q, q, dropout_p=0.5, rng_state=jax.random.key(1)))
    one, other = q
    close(jax.vmap(drop)(q), jnp.stack([drop(one), drop(other)]))


@pytest.fixture
def partitioner(request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA's partitioner: Shardy, or GSPMD before it."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    jax.clear_caches()
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"], indirect=True)
def test_sequences_and_heads_stay_on_their_devices(partitioner: None) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "heads"))
    arrays = (
        *(random(8, 16, 4, 8), random(8, 16, 2, 8, seed=1), random(8, 16, 2, 8, seed=2)),
        *(random(1, 4, 16, 16), random(4).astype(jnp.float32)),
    )
    rows = PartitionSpec("data", None, "heads")
    specs = (rows, rows, rows, PartitionSpec(None, "heads"), PartitionSpec("heads"))

    def loss(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
        out = attention(q, k, v, bias=bias, sink=sink, softmax="learnable", mask="causal")
        return (out.astype(jnp.float32) ** 2).sum()

    def loss_of_parts(*arrays: Any) -> Any:
        return jax.lax.psum(loss(*arrays), ("data", "heads"))

    gradients = jax.jit(jax.grad(loss, argnums=range(5)))
    spread = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    text = gradients.lower(*spread).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text
    found = gradients(*spread)
    close(found, gradients(*arrays))
    q, *_ = found
    assert q.sharding.spec == PartitionSpec("data", None, "heads")
    local = jax.shard_map(loss_of_parts, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    close(jax.jit(jax.grad(local, argnums=range(5)))(*spread), gradients(*arrays))


def test_numbers_of_heads_that_fragments_read_are_spread_with_these(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), "heads")
    rows = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    coolness = jnp.asarray([0.1, 1, 2, 4], jnp.float32)

    def warm(q: Any, coolness: Any) -> Any:
        return attention(q, q, q, score_mod="warm_spread", coolness_spread=coolness)

    with kept():
        register_fragment(write(tmp_path / "score", SCORE, "warm", "spread"))
        q, call = random(2, 8, 4, 8), jax.jit(warm)
        found = call(jax.device_put(q, rows), coolness)
        assert found.sharding.is_equivalent_to(rows, 4)
        close([found], [call(q, coolness)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_one_head_of_keys_is_every_device_s_own(dropout_p: float) -> None:
    """Its gradients are sums over devices; dropout, whose bits belong to heads, gathers instead."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "heads"))
    arrays = random(4, 8, 4, 8), random(4, 8, 1, 8, seed=1), random(4, 8, 1, 8, seed=2)
    specs = PartitionSpec("data", None, "heads"), PartitionSpec("data"), PartitionSpec("data")
    words = {"dropout_p": dropout_p, "rng_state": (3, 4)} if dropout_p else {}

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = attention(q, k, v, mask="causal", **words)
        return (out.astype(jnp.float32) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=range(3)))
    spread = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    gathers = "all-gather" in gradients.lower(*spread).compile().as_text()
    assert gathers == (dropout_p > 0)
    close(gradients(*spread), gradients(*arrays))


def test_policy_saves_what_a_call_names() -> None:
    q = random(1, 8, 2, 8)

    def loss(policy: Any) -> Callable[[Any], Any]:
        call = jax.checkpoint(lambda q: attention(q, q, q), policy=policy)
        return lambda q: call(q).astype(jnp.float32).sum()

    def forwards(policy: Any) -> int:
        program = jax.make_jaxpr(jax.value_and_grad(loss(policy)))(q)
        dead, _ = jax.interpreters.partial_eval.dce_jaxpr(program.jaxpr, [True, True])
        return len([*calls_in(dead, of_gradients=False)])

    saving = jax.checkpoint_policies.save_only_these_names("context")
    assert (forwards(None), forwards(saving)) == (2, 1)


@pytest.mark.slow
def test_layers_are_scanned_with_gradients() -> None:
    q = random(1, 8, 2, 8)

    def layers(q: Any, count: int, scanned: bool) -> Any:
        def layer(q: Any, _: None) -> tuple[Any, None]:
            return attention(q, q, q, mask="causal"), None

        if scanned:
            q, _ = jax.lax.scan(jax.checkpoint(layer), q, None, length=count)
        else:
            for _ in range(count):
                q, _ = layer(q, None)
        return (q.astype(jnp.float32) ** 2).sum()

    wanted, found = (jax.grad(layers)(q, 2, scanned) for scanned in (False, True))
    close([found], [wanted])


@pytest.fixture
def described_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are described where they would be compiled."""
    monkeypatch.setattr("attngen.call.kernel_choice.find_kernels", launch_kit.find_kernels)
    monkeypatch.setattr("attngen.call.kernel_choice._kernels", {})


@pytest.mark.usefixtures("described_kernels")
def test_program_for_cuda_is_exported_without_a_gpu() -> None:
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)

    def loss(q: Any, k: Any) -> Any:
        out = attention(q, k, k, mask="causal", backend="cuda")
        return (out.astype(jnp.float32) ** 2).sum()

    allowed = [jax.export.DisabledSafetyCheck.custom_call("attngen")]
    program = jax.jit(jax.value_and_grad(loss))
    exported = jax.export.export(program, platforms=["cuda"], disabled_checks=allowed)(q, q)
    assert jax.export.deserialize(exported.serialize()).platforms == ("cuda",)
    calls = [x for x in exported.mlir_module().splitlines() if "custom_call @attngen" in x]
    assert len(calls) == 2 and "wanted" not in calls.pop(0) and "wanted" in calls.pop()
    sizes = jax.export.symbolic_shape("b, 256, 4, 64")
    with pytest.raises(ValueError, match="sizes are numbers"):
        symbols = jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
        jax.export.export(program, platforms=["cuda"], disabled_checks=allowed)(symbols, symbols)
