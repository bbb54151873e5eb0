"""The JAX front end: XLA calls the kernels, in its graphs and outside of them, and leaves in peace.

With --emulate the handler is registered for XLA's CPU: frames, addresses and scratch are XLA's own.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attngen import reference

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the memory
jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.gpu
TOLERANCE = 1.5e-2  # of the largest number; of gradients, whose terms are 16 bits, twice


@pytest.fixture(scope="module", autouse=True)
def device(request: pytest.FixtureRequest, emulator: Any) -> Iterator[None]:
    """A device of JAX's with kernels: CUDA, or the host in its place."""
    if request.config.getoption("emulate"):
        from ..emulator.jax_host import emulated_jax

        with emulated_jax(emulator):
            yield
        return
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("needs a jax with CUDA; jax.devices('cuda') has none")
    yield


def random(*shape: int, seed: int = 0, dtype: str = "bfloat16") -> Any:
    """Normal numbers."""
    numbers = np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)
    return jnp.asarray(numbers).astype(dtype)


def carriers(b: int, h: int, h_kv: int, s: int, t: int, d: int, **more: Any) -> dict[str, Any]:
    """Q, K and V, bshd."""
    shapes = {"q": (b, s, h, d), "k": (b, t, h_kv, d), "v": (b, t, h_kv, d)}
    return {name: random(*x, seed=n, **more) for n, (name, x) in enumerate(shapes.items())}


def doubles(x: Any) -> torch.Tensor:
    """An array in float64, or as it is where it holds no floats."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return torch.tensor(np.asarray(x.astype("float32"))).double()
    return torch.tensor(np.asarray(x))


def truth(given: dict[str, Any], learned: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Output, LSE, and gradients of Σ O² + Σ LSE, in float64."""
    tensors = {n: doubles(x) if hasattr(x, "dtype") else x for n, x in given.items()}
    if isinstance(state := tensors.get("rng_state"), tuple):
        tensors["rng_state"] = torch.tensor(state)
    leaves = [tensors[name].requires_grad_() for name in learned]
    out, aux = reference.attention(**tensors)
    found = {"o": out, "lse": aux.lse}
    if learned:
        loss = (out**2).sum() + torch.where(aux.lse > -math.inf, aux.lse, 0).sum()
        found |= dict(zip(learned, torch.autograd.grad(loss, leaves), strict=True))
    return {name: x.detach().numpy() for name, x in found.items()}


def attend(given: dict[str, Any], learned: tuple[str, ...]) -> dict[str, np.ndarray]:
    """These by kernels, in a jit."""
    from attngen.jax import attention

    words = {name: x for name, x in given.items() if not hasattr(x, "dtype")}
    arrays = {name: x for name, x in given.items() if hasattr(x, "dtype")}

    def run(arrays: dict[str, Any]) -> Any:
        fixed = {name: x for name, x in arrays.items() if name not in learned}

        def loss(values: dict[str, Any]) -> Any:
            out, aux = attention(**fixed, **values, **words, return_lse=True, backend="cuda")
            wide = out.astype(jnp.float32)
            rows = jnp.where(aux.lse > -jnp.inf, aux.lse, 0)
            return (wide**2).sum() + rows.sum(), {"o": out, "lse": aux.lse}

        values = {name: arrays[name] for name in learned}
        gradients, found = jax.grad(loss, has_aux=True)(values)
        return {**found, **gradients}

    made = jax.jit(run)(arrays)
    return {name: np.asarray(x.astype("float32")) for name, x in made.items()}


def compare(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Raises: AssertionError naming what is wrong."""
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        y, finite = found[name], np.isfinite(x)
        assert y.shape == x.shape and np.array_equal(np.isfinite(y), finite), name
        limit = TOLERANCE * (1 if name in ("o", "lse") else 2)
        error = np.abs(y[finite] - x[finite]).max(initial=0) / np.abs(x[finite]).max(initial=1)
        assert error <= limit, f"{name}: {error:.2e}"


ENDS = jnp.asarray([0, 70, 70, 181], jnp.int32)
PACKED = {
    "q": random(200, 4, 64, seed=1),
    "k": random(200, 2, 64, seed=2),
    "v": random(200, 2, 64, seed=3),
    "layout": "thd",
    "cu_seqlens_q": ENDS,
    "cu_seqlens_kv": ENDS,
    "mask": "causal",
}
CASES: dict[str, dict[str, Any]] = {
    "causal, groups of heads, odd lengths": {**carriers(2, 4, 2, 133, 133, 64), "mask": "causal"},
    "bias and sink": {
        **carriers(2, 4, 2, 96, 96, 64),
        "bias": random(1, 4, 96, 96, seed=4),
        "sink": random(4, seed=5, dtype="float32"),
        "softmax": "learnable",
        "mask": "causal",
    },
    "packed": PACKED,
    "full, float16, head dim 128": carriers(1, 2, 2, 200, 300, 128, dtype="float16"),
    "head dim 256": {**carriers(1, 2, 1, 130, 130, 256), "mask": "causal"},
    "odd head dims": {**carriers(1, 2, 2, 70, 70, 60), "mask": "causal"},
    "window, softcap and slopes": {
        **carriers(2, 4, 4, 300, 300, 64),
        "window": (64, 0),
        "softcap": 5.0,
        "alibi_slopes": random(4, seed=6, dtype="float32") ** 2 / 64,
    },
    "dropout": {
        **carriers(2, 4, 2, 128, 128, 64),
        "dropout_p": 0.25,
        "rng_state": (0x1234_5678_9ABC, 77),
        "mask": "causal",
    },
    "lengths in use and a sink": {
        **carriers(3, 4, 2, 150, 170, 64),
        "seqused_q": jnp.asarray([150, 0, 77], jnp.int32),
        "seqused_kv": jnp.asarray([0, 170, 99], jnp.int32),
        "sink": random(4, seed=7, dtype="float32"),
        "softmax": "learnable",
        "mask": "padding_causal_bottom_right",
    },
    "one tensor": {"q": random(2, 90, 3, 4, 64), "layout": "bs3hd", "mask": "causal"},
    "deterministic": {
        **carriers(1, 4, 2, 200, 200, 64),
        "mask": "causal",
        "deterministic": True,
    },
    "no keys": carriers(1, 2, 2, 5, 0, 64),
}
LEARNED = ("q", "k", "v", "bias", "sink")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_are_right(case: dict[str, Any]) -> None:
    learned = tuple(name for name in LEARNED if name in case)
    words = {name: x for name, x in case.items() if name != "deterministic"}
    compare(attend(case, learned), truth(words, learned))


def test_pages_and_largest_scores() -> None:
    """Inference, whose keys are read in parts, and results that a launch finds filled."""
    from attngen.jax import attention

    pages = {name: random(9, 64, 2, 128, seed=n) for n, name in enumerate(("k", "v"))}
    given = {
        "q": random(2, 1, 8, 128),
        **pages,
        "page_table": jnp.asarray([[8, 0, 3], [1, 2, 5]], jnp.int32),
        "seqused_kv": jnp.asarray([150, 64], jnp.int32),
        "layout": "paged_kv_bshd_bshd_bshd",
    }
    wanted = truth(given, ())
    out = attention(**given, backend="cuda")
    compare({"o": np.asarray(out.astype("float32"))}, {"o": wanted["o"]})
    q = carriers(1, 2, 2, 70, 70, 64)
    _, aux = attention(**q, return_max_logit=True, backend="cuda")
    scores = torch.einsum("bihd,bjhd->bhij", doubles(q["q"]), doubles(q["k"])) / 8
    assert np.allclose(aux.max_logit, scores.amax((0, 2, 3)).numpy(), rtol=1e-3)


def test_mapped_calls_are_one_launch_and_layers_are_scanned() -> None:
    """Under vmap, scan and checkpoint, gradients with them."""
    from attngen.jax import attention

    x = random(3, 2, 64, 4, 64)

    def call(q: Any, k: Any) -> Any:
        return attention(q, k, k, mask="causal", backend="cuda")

    mapped = jax.jit(jax.vmap(call))(x, x)
    apart = jnp.stack([call(each, each) for each in x])
    assert jnp.array_equal(mapped, apart)
    (q, *_) = x

    def layers(q: Any, remat: bool) -> Any:
        def layer(q: Any, _: None) -> tuple[Any, None]:
            return call(q, q), None

        step = jax.checkpoint(layer) if remat else layer
        last, _ = jax.lax.scan(step, q, None, length=3)
        return (last.astype(jnp.float32) ** 2).sum()

    one, other = (jax.jit(jax.grad(layers), static_argnums=1)(q, remat) for remat in (False, True))
    largest = jnp.abs(one.astype(jnp.float32)).max()
    assert jnp.abs((one - other).astype(jnp.float32)).max() <= TOLERANCE * largest


def test_fp8_forward_finds_its_maxima_filled() -> None:
    from attngen.jax import attention

    wide = carriers(1, 4, 2, 100, 200, 64, dtype="float32")
    short = {name: x.astype(jnp.float8_e4m3fn) for name, x in wide.items()}
    scale = jnp.asarray([0.5], jnp.float32)
    words = {"descale_k": scale, "return_amax": True}
    out, aux = attention(**short, **words, backend="cuda")
    wanted, theirs = attention(**short, **words, backend="reference")
    one, other = (np.asarray(x.astype("float32")) for x in (out, wanted))
    assert np.abs(one - other).max() <= 0.06 * np.abs(other).max()
    assert np.allclose(aux.amax_o, theirs.amax_o, rtol=0.03) and aux.amax_s == 1


@pytest.mark.parametrize(
    "backward, scaling", [("16", "tensor"), ("fp8", "tensor"), ("16", "token")]
)
@pytest.mark.parametrize("added", [False, True], ids=["", "bias"])
def test_fp8_attention_has_the_gradients_of_its_definition(
    backward: str, scaling: str, added: bool
) -> None:
    from attngen.jax import Float8CurrentScaling, fp8_attention

    given = {**carriers(2, 4, 2, 130, 200, 64), "sink": random(4, dtype="float32")}
    if added:  # in a dtype that kernels do not read beside 8 bits
        given["bias"] = random(1, 4, 130, 200, dtype="float32")
    recipe = Float8CurrentScaling(backward=backward, scaling=scaling)

    def gradients(backend: str) -> Any:
        def loss(values: dict[str, Any]) -> Any:
            out = fp8_attention(
                **values, mask="causal", softmax="learnable", recipe=recipe, backend=backend
            )
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss))(given)

    found, wanted = gradients("cuda"), gradients("reference")
    for name, exact in wanted.items():
        one, other = (np.asarray(x.astype("float32")) for x in (found[name], exact))
        limit = {"16": 0.03, "fp8": 0.06}[backward]  # dS in e5m2 has steps of an eighth and more
        assert np.sqrt(((one - other) ** 2).mean()) <= limit * np.sqrt((other**2).mean()), name


RING = {"order": "dual_chunk", "mask": "causal", "softmax": "off_by_one"}
DROPPED = {"mask": "causal", "window": (90, 0), "alibi_slopes": True, "dropout_p": 0.25}


@pytest.mark.parametrize(
    ("strategy", "words"),
    [("RING", RING), ("ALL_GATHER", {"order": "contiguous", "rng_state": (5, 6), **DROPPED})],
    ids=["ring", "gathered"],
)
def test_sequences_over_an_axis_are_one_call(strategy: str, words: dict[str, Any]) -> None:
    """Elements of a vmap with a named axis stand for devices."""
    from attngen.jax import CPStrategy, context_attention

    from attngen.call.context.order import Order

    given = carriers(1, 4, 2, 256, 256, 64)
    order = Order(words["order"], 2)
    held = {n: jnp.stack([x[:, np.array(order.shard(r, [256]))] for r in (0, 1)])
            for n, x in given.items()}  # fmt: skip
    spread = {"axis": "cp", "strategy": CPStrategy[strategy], "backend": "cuda", "return_lse": True}

    def loss(held: dict[str, Any]) -> Any:
        out, aux = context_attention(**held, **spread, **words)
        return (out.astype(jnp.float32) ** 2).sum() + aux.lse.sum(), {"o": out, "lse": aux.lse}

    run = jax.vmap(jax.grad(loss, has_aux=True), axis_name="cp")
    gradients, found = jax.jit(run)(held)
    axes, back = {"lse": 2}, np.array(order.unshard([256]))
    made = {name: np.concatenate([*np.asarray(x.astype("float32"))], axes.get(name, 1))
            for name, x in {**found, **gradients}.items()}  # fmt: skip
    whole = {name: np.take(x, back, axes.get(name, 1)) for name, x in made.items()}
    one = {name: x for name, x in words.items() if name != "order"}
    compare(whole, truth({**given, **one}, ("q", "k", "v")))


@pytest.mark.device
@pytest.mark.filterwarnings("error:Some donated buffers")
def test_output_may_lie_where_a_donated_operand_was() -> None:
    from attngen.jax import attention

    def step(x: Any, other: Any) -> Any:
        return attention(x, other, other, mask="causal", backend="cuda")

    x, other = random(2, 200, 4, 64), random(2, 200, 4, 64, seed=1)
    wanted = jax.jit(step)(x, other)
    given = x + 0
    found = jax.jit(step, donate_argnums=0)(given, other)
    assert given.is_deleted() and jnp.array_equal(found, wanted)


def test_trace_notes_what_programs_launch() -> None:
    from attngen.jax import attention

    import attngen

    x = random(1, 64, 4, 64)
    with attngen.trace() as trace:
        jax.jit(lambda q: attention(q, q, q, mask="causal", backend="cuda"))(x).block_until_ready()
    assert {problem.head_dim_qk for problem, _ in trace.variants} == {64}


@pytest.mark.device
def test_calls_of_threads_and_other_addresses() -> None:
    """Several threads dispatch one program, whose buffers lie elsewhere each time."""
    from attngen.jax import attention

    program = jax.jit(lambda q, k, v: attention(q, k, v, mask="causal", backend="cuda"))
    inputs = [carriers(1, 4, 2, 256 + 64, 256 + 64, 128) for _ in range(8)]
    inputs = [{n: x + number for n, x in each.items()} for number, each in enumerate(inputs)]
    wanted = [np.asarray(program(**each).astype("float32")) for each in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            found = np.asarray(program(**inputs[number]).astype("float32"))
            if not np.array_equal(found, wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@pytest.mark.device
def test_devices_have_their_own_sequences() -> None:
    """Calls on a device that is not the first, and sequences that are spread over several."""
    from attngen.jax import attention
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two devices")
    one, other = jax.devices("cuda")[:2]
    given = carriers(4, 4, 2, 200, 200, 64)

    @jax.jit
    def gradients(q: Any, k: Any, v: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            out = attention(*arrays, mask="causal", backend="cuda")
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    wanted = gradients(**{name: jax.device_put(x, one) for name, x in given.items()})
    found = gradients(**{name: jax.device_put(x, other) for name, x in given.items()})
    rows = NamedSharding(Mesh(np.array([one, other]), "data"), PartitionSpec("data"))
    spread = gradients(**{name: jax.device_put(x, rows) for name, x in given.items()})
    for here, there, apart in zip(wanted, found, spread, strict=True):
        here, there, apart = (np.asarray(x.astype("float32")) for x in (here, there, apart))
        assert np.abs(here - there).max() <= TOLERANCE * np.abs(here).max()
        assert np.abs(here - apart).max() <= TOLERANCE * np.abs(here).max()


def test_segments_of_rows_in_the_words_of_transformer_engine() -> None:
    from attngen import jax as front

    given = carriers(2, 4, 2, 96, 96, 64)
    ids = np.zeros((2, 96), np.int32)
    ids[0, :40], ids[0, 40:90], ids[1, :77] = 1, 2, 1
    pair = jnp.asarray(ids), jnp.zeros_like(ids)
    described = front.SequenceDescriptor.from_segment_ids_and_pos(*pair)
    out = jax.jit(
        lambda q, k, v, described: front.fused_attn(
            *((q, k, v), None, described, None, front.AttnBiasType.NO_BIAS),
            *(front.AttnMaskType.PADDING_CAUSAL_MASK, front.QKVLayout.THD_THD_THD),
            *(front.AttnSoftmaxType.VANILLA_SOFTMAX, 0.125, 0.0, True),
            max_segments_per_seq=3,
        )
    )(**given, described=described)
    together = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] > 0)
    wanted = truth({**given, "mask": "causal", "attn_mask": together[:, None]}, ())
    compare({"o": np.asarray(out.astype("float32"))}, {"o": wanted["o"]})
