"""Functions of positions in JAX: their programs beside the functions themselves, and torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

from attngen.jax import attention  # noqa: E402

from attngen import SpecError, reference  # noqa: E402
from attngen.call.numbers import Arguments  # noqa: E402
from attngen.errors import LaunchError  # noqa: E402
from attngen.fragments import features  # noqa: E402
from attngen.frontends.jax.callables import trace  # noqa: E402
from attngen.frontends.jax.program import Program  # noqa: E402
from attngen.frontends.pytorch.callables import program as callable_program  # noqa: E402
from attngen.frontends.pytorch.callables import trace as callable_trace  # noqa: E402
from tests.support import launch_kit  # noqa: E402
from tests.support.jax_kit import random  # noqa: E402
from tests.support.own_fragments import kept  # noqa: E402

jnp = jax.numpy
B, H, S, D = 2, 4, 24, 16
Q, K, V = (jnp.asarray(random(B, S, h, D, seed=h), jnp.bfloat16) for h in (H, 2, 1))
K, V = K, jnp.concatenate([V, 1 - V], axis=2)
TABLE = random(33, H).astype(np.float32)
SEGMENTS = np.sort(random(B, S) > 0, axis=1).astype(np.int32)


def relative_table(s, b, h, i, j):
    return s + jnp.asarray(TABLE)[jnp.clip(j - i, -16, 16) + 16, h]


def segments(s, b, h, i, j):
    ids = jnp.asarray(SEGMENTS)
    return jnp.where(ids[b, i] == ids[b, j], s, s - 3 * jnp.abs(s) - (i // 3 - j % 5))


def capped(s, b, h, i, j):
    return 4 * jnp.tanh(s / 4) * jax.nn.sigmoid(jnp.asarray(TABLE)[3])[h]


def powers(s, b, h, i, j):
    cooled = jnp.sign(s) * (s * s + 0.0625) ** 0.35
    return jnp.clip(cooled, -1.5, 1.25) + jnp.log1p(jnp.float32(i - j) ** 2) / 8


def results(mod: Any, backend: str, **words: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        out, aux = attention(q, k, v, score_mod=mod, return_lse=True, backend=backend, **words)
        rows = jnp.where(aux.lse > -jnp.inf, aux.lse, 0)
        return (out.astype(jnp.float32) ** 2).sum() + rows.sum(), (out, aux.lse)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(Q, K, V)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mod", [relative_table, segments, capped, powers])
def test_programs_compute_what_functions_do(mod: Any) -> None:
    words = {"mask": "causal", "seqused_q": np.array([S, 7]), "seqused_kv": np.array([S, 9])}
    words |= {name: np.int32(words[name]) for name in ("seqused_q", "seqused_kv")}
    found, wanted = (jax.tree.leaves(results(mod, x, **words)) for x in ("auto", "reference"))
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(x.astype(jnp.float32)) for x in (one, other))
        assert np.array_equal(np.isfinite(one), np.isfinite(other))
        assert np.allclose(one, other, atol=0.02)
        assert np.abs(other[np.isfinite(other)]).max() > 0.1


def test_slope_of_a_program_is_the_derivative() -> None:
    """Kernels make gradients of it, where the definition differentiates the value itself."""
    program = trace(powers).program
    again = trace(lambda s, b, h, i, j: jax.grad(powers)(s, b, h, i, j)).program
    numbers = [trace(powers).numbers, trace(jax.grad(powers)).numbers]
    from attngen.frontends.jax.callable_values import value_of

    known = {"s": jnp.linspace(-2, 2, 9), **dict.fromkeys("bhij", jnp.int32(0))}
    slope = value_of(
        type(program)((), program.numbers, program.operations, program.slope, ""),
        (), numbers[0], known,
    )  # fmt: skip
    assert np.allclose(slope, value_of(again, (), numbers[1], known), rtol=1e-5)


def test_a_square_less_than_one_is_what_newer_versions_of_jax_say() -> None:
    from jax.extend.core import Primitive
    from jax.interpreters import ad

    from attngen.frontends.jax.callable_values import value_of

    primitive = Primitive("one_minus_square")
    primitive.def_abstract_eval(lambda x: x)
    ad.defjvp(primitive, lambda g, x: -2 * g * x)
    traced = trace(lambda s, b, h, i, j: s * primitive.bind(s))
    known = {"s": jnp.linspace(-2, 2, 9), **dict.fromkeys("bhij", jnp.int32(0))}
    found = value_of(traced.program, (), traced.numbers, known)
    assert np.allclose(found, known["s"] * (1 - known["s"] ** 2), atol=1e-6)


def test_result_is_that_of_torch_and_the_program_as_well() -> None:
    slopes = random(H).astype(np.float32)

    def biased(s, b, h, i, j):
        return s + torch.tensor(slopes)[h] * (j - i)

    def in_jax(s, b, h, i, j):
        return s + jnp.asarray(slopes)[h] * (j - i)

    tensors = [torch.tensor(np.asarray(x.astype(jnp.float32))) for x in (Q, K, V)]
    wanted, _ = reference.attention(*tensors, score_mod=biased, mask="causal")
    found = attention(Q, K, V, score_mod=in_jax, mask="causal")
    assert np.allclose(found.astype(jnp.float32), wanted.numpy(), atol=0.02)
    device = torch.device("cpu")
    graph = callable_trace.trace("score_mod", biased, device)
    assert callable_program.score_program(graph, device).program == trace(in_jax).program


def test_new_numbers_and_arrays_are_the_same_program() -> None:
    def capped_at(cap: float, gains: Any) -> Any:
        return lambda s, b, h, i, j: cap * jnp.tanh(s / cap) * gains[h]

    one, other = (trace(capped_at(cap, jnp.full(n, cap))) for cap, n in ((3.0, 4), (7.0, 9)))
    assert one.program == other.program and one.numbers != other.numbers
    gradient = jax.jit(lambda gains: trace(capped_at(2.0, gains)).captures[0] * 1)
    assert jnp.array_equal(gradient(jnp.ones(3)), jnp.ones(3))  # a traced array is captured, too


@pytest.mark.parametrize("packed", [False, True])
def test_masks_are_booleans_of_the_planes_they_depend_on(packed: bool) -> None:
    ids = jnp.asarray(SEGMENTS)
    arrays, words = (Q, K, V), {}
    if packed:
        ends = np.array([0, 9, 24], np.int32)
        arrays = tuple(x[0] for x in arrays)
        words = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    i, j = jnp.arange(S)[:, None], jnp.arange(S)
    near = jnp.abs(i - j) < 6
    together = (ids[:, :, None] == ids[:, None, :])[:, None]

    def same(mod: Any, shown: Any) -> bool:
        found = attention(*arrays, mask_mod=mod, **words)
        return bool(jnp.array_equal(found, attention(*arrays, attn_mask=shown, **words)))

    assert same(lambda b, h, i, j: jnp.abs(i - j) < 6, near[None, None])
    if not packed:
        assert same(lambda b, h, i, j: ids[b, i] == ids[b, j], together)
    program = jax.make_jaxpr(lambda q: attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j))(Q)
    masks = {x.aval.shape for x in program.eqns[-1].invars if x.aval.dtype == bool}
    assert masks == {(1, 1, S, S)}


def test_mapped_functions_are_calls_one_after_another() -> None:
    tables = jnp.asarray(random(2, 33, H), jnp.float32)

    def call(q: Any, table: Any) -> Any:
        return attention(q, K, V, score_mod=lambda s, b, h, i, j: s + table[j, h])

    both = jax.vmap(call)(jnp.stack([Q, 2 * Q]), tables)
    assert jnp.allclose(both[1], call(2 * Q, tables[1]), atol=0.02)


@pytest.mark.parametrize(
    ("mod", "says"),
    [
        (lambda s, b, h, i, j: s if i > j else -s, "data-dependent control flow"),
        (lambda s, b, h, i, j: s + jnp.asarray(TABLE)[i].sum(), "has an operation that kernels"),
        (lambda s, b, h, i, j: jnp.stack([s, s]), r"returns float32\[2\]"),
        (lambda s, b, h, i, j: i > j, "returns bool"),
        (lambda s, b, h, i, j: s + i.astype(jnp.int8) * 3, "computes with int8"),
    ],
    ids=["control flow", "a row", "two numbers", "a bool", "int8"],
)
def test_what_kernels_lack_is_refused(mod: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        attention(Q, K, V, score_mod=mod, backend="cuda")


def test_what_kernels_lack_the_definition_computes() -> None:
    table = jnp.asarray(TABLE)
    found = attention(Q, K, V, score_mod=lambda s, b, h, i, j: s + table[i].sum())
    bias = jnp.broadcast_to(table[:S].sum(1)[:, None], (S, S))[None, None]
    assert jnp.allclose(found, attention(Q, K, V, bias=bias), atol=0.02)


def learning(given: Any, backend: str, **words: Any) -> Any:
    """A loss of calls whose score reads arrays: twice, in 16 bits, and under a condition."""

    def mod(s, b, h, i, j):
        bias = given["table"][jnp.clip(j - i, -16, 16) + 16, h] * given["gain"]
        ids = jnp.asarray(SEGMENTS)
        far = ids[b, i] != ids[b, j]
        soft = jnp.tanh(s * given["by_head"][h]) + given["by_head"][h // 2] ** 2
        return jnp.where(far, s + bias, soft.astype(jnp.float32))

    out = attention(Q, K, V, score_mod=mod, mask="causal", backend=backend, **words)
    return (out.astype(jnp.float32) ** 2).sum()


LEARNED = {
    "table": jnp.asarray(TABLE),
    "gain": jnp.float32(0.75),
    "by_head": jnp.asarray(TABLE[0], jnp.bfloat16),
}


def test_gradients_of_captured_arrays_are_the_definitions() -> None:
    step = jax.jit(jax.grad(learning), static_argnums=1)
    assert "traced_learned_" in str(step.trace(LEARNED, "auto").jaxpr)
    found, wanted = (step(LEARNED, backend) for backend in ("auto", "reference"))
    for name, x in LEARNED.items():
        one, other = (np.asarray(each[name].astype(jnp.float32)) for each in (found, wanted))
        assert found[name].dtype == x.dtype and np.abs(other).max() > 0.05
        assert np.abs(one - other).max() <= 0.02 * np.abs(other).max(), name


def test_arrays_that_are_no_traces_learn_nothing_and_order_is_refused() -> None:
    mod = lambda s, b, h, i, j: s + jnp.asarray(TABLE)[j, h]  # noqa: E731
    assert not trace(mod).program.learned
    with pytest.raises(SpecError, match="pass deterministic=False"):
        jax.grad(learning)(LEARNED, "auto", deterministic=True)


def test_gradients_of_captures_in_parts_are_summed() -> None:
    """Under `vmap` as calls one after another, over a mesh as a whole's."""
    grad = jax.grad(learning)
    two = {name: jnp.stack([x, 2 * x]) for name, x in LEARNED.items()}
    mapped = jax.vmap(lambda x: grad(x, "auto"))(two)
    wanted = grad({name: x[1] for name, x in two.items()}, "auto")
    assert all(jnp.allclose(mapped[name][1], x, rtol=0.02, atol=0.02) for name, x in wanted.items())


def test_program_for_cuda_names_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.call.kernel_choice.find_kernels", launch_kit.find_kernels)
    monkeypatch.setattr("attngen.call.kernel_choice._kernels", {})

    def step(q: Any) -> Any:
        return jax.grad(lambda q: attention(q, q, q, score_mod=capped).sum())(q)

    x = jax.ShapeDtypeStruct((1, 256, H, 128), jnp.bfloat16)
    text = jax.jit(step).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @attngen" in line]
    assert len(calls) == 2 and all(trace(capped).program.name in line for line in calls)
    text = jax.jit(jax.grad(learning), static_argnums=1).trace(LEARNED, "auto").lower(
        lowering_platforms=("cuda",)
    ).as_text()
    calls = [line for line in text.splitlines() if "custom_call @attngen" in line]
    assert len(calls) == 2 and all("traced_learned_" in line for line in calls)
    count = sum(x.size for x in LEARNED.values())
    assert f"tensor<{count}xf32>" in calls[1] and f"tensor<{count}xf32>" not in calls[0]


def test_program_of_another_process_brings_its_function() -> None:
    own = trace(lambda s, b, h, i, j: s + jnp.asarray(TABLE)[(i - j) % 7, h]).program
    with kept():
        name = features.register_program(own).name
        text = Program((), Arguments(score_mod=name), None, False, "sm_90a").text
    with kept():
        assert name not in features.scan()["score"]
        assert Program.parse(text.encode()).arguments.score_mod == name
        assert name in features.scan()["score"]
    with pytest.raises(LaunchError):
        Program.parse(text.replace("sub i i j", "sub i i").encode())
