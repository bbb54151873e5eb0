"""Calls of arrays: arguments are the table's, and what means nothing is refused in a trace."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from attngen.jax import attention  # noqa: E402

from attngen import SpecError  # noqa: E402
from attngen.call.table import ROWS  # noqa: E402
from attngen.frontends.jax import checks  # noqa: E402
from attngen.frontends.jax.calls import default_slopes, words_of_state  # noqa: E402
from attngen.reference import default_alibi_slopes  # noqa: E402

jnp = jax.numpy
Q = jnp.zeros((2, 8, 4, 64), jnp.bfloat16)
SHORT = jnp.zeros((2, 8, 3, 64), jnp.bfloat16)


def refused(q: Any = Q, k: Any = Q, v: Any = Q, **given: Any) -> str:
    """The refusal of a call that is being traced."""
    with pytest.raises(SpecError) as caught:
        jax.eval_shape(lambda *x: attention(*x, **given), q, k, v)
    return "\n".join(caught.value.reasons)


def test_arguments_are_those_of_the_table() -> None:
    parameters = inspect.signature(attention).parameters
    assert [*parameters] == [*ROWS]
    assert all(f"{name}: " in (attention.__doc__ or "") for name in ROWS)
    with pytest.raises(TypeError, match=r"attngen.jax.attention.*'maks'; did you mean 'mask'"):
        attention(Q, Q, Q, maks="causal")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"k": SHORT, "v": SHORT}, "4 query heads are not a multiple of 3"),
        ({"layout": "thd"}, "layout='thd_thd_thd' needs q of shape"),
        ({"mask": "casual"}, "is not a mask. Use one of none, causal, "),
        ({"mask": np.ones((8, 8), bool)}, "got bool [8, 8]. Pass booleans a pair as attn_mask"),
        ({"mask": "chunked"}, "mask 'chunked' needs chunked: "),
        ({"mask": "chunked", "chunked": 0}, "chunked needs an int >= 1; got 0"),
        ({"mask": "chunked", "chunked": np.ones(2, np.int32)}, "an int >= 1; got an array"),
        ({"mask": "causal", "chunked": 4}, "chunked belongs to mask='chunked'"),
        ({"mask": "prefix"}, "Pass an int or int32 [b]"),
        ({"mask": "prefix", "prefix": 2.5}, "prefix needs an int or int32 [b]; got 2.5"),
        ({"score_mod": "softcap"}, "score_mod 'softcap' is asked for by a field of its own"),
        ({"score_mod": 3}, "score_mod needs a function; got 3"),
        ({"mask_mod": lambda i, j: i >= j}, "mask_mod is called as mask_mod(b, h, i, j)"),
        ({"mask": "causal_bottom_right", "bottom_right": False}, "aligns to the bottom right"),
        ({"bottom_right": "yes"}, "bottom_right needs True, False or None; got 'yes'"),
        ({"return_lse": "yes"}, "return_lse needs True or False; got 'yes'"),
        ({"dropout_p": None}, "dropout_p needs a number; got NoneType"),
        ({"score_mod": ""}, "score_mod '' is unknown"),
        ({"mask": "padding"}, "needs the lengths of k and v"),
        ({"softmax": "learnable"}, "softmax='learnable' needs sink float32 [h_q]"),
        ({"dropout_p": 0.1}, "needs rng_state"),
        ({"dropout_p": 1.1}, "a probability in 0..1"),
        ({"bias": np.ones((2, 8), bool)}, "Pass booleans as attn_mask"),
        ({"score_mod": lambda *x: x}, "score_mod returns 5 results"),
        ({"backend": "triton"}, "allowed: auto, cuda, reference"),
        ({"seqused_q": np.ones(3, np.int32)}, "seqused_q needs int32 [b] with b=2"),
        ({"softmax_scale": "big"}, "softmax_scale needs a number"),
        ({"window": 5}, "window needs two sides"),
        ({"softmax_scale": -1.0, "backend": "cuda"}, "kernels take a positive float32 number"),
        ({"out": Q}, "out belongs to tensors of torch"),
        ({"out_layout": "like_q"}, "XLA lays arrays out"),
        ({"num_splits": 0}, "num_splits=0 is no number of parts"),
        ({"descale_k": np.ones((1, 4, 8), np.float32)}, "descale_k belongs to FP8 q, k and v"),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, Any], says: str) -> None:
    assert says in refused(**given)


def test_numbers_are_known_while_tracing() -> None:
    with pytest.raises(SpecError, match="softmax_scale needs a number that is known"):
        jax.jit(lambda scale: attention(Q, Q, Q, softmax_scale=scale))(0.5)


def test_kernels_that_a_call_names_are_not_on_the_cpu() -> None:
    with pytest.raises(SpecError, match="has no kernels; available: sm_90a"):
        attention(Q, Q, Q, backend="cuda")
    with pytest.raises(SpecError, match="fp32"):
        attention(*[Q.astype(jnp.float32)] * 3, backend="cuda")


def test_operand_that_only_the_table_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEFINED", tuple(x for x in checks.DEFINED if x != "sink"))
    says = refused(softmax="learnable", sink=np.ones(4, np.float32))
    assert says == "sink has no definition over arrays of JAX yet; leave it out"


def test_gradients_that_kernels_lack_are_refused() -> None:
    def call(slopes: Any) -> Any:
        return attention(Q, Q, Q, alibi_slopes=slopes).astype(jnp.float32).sum()

    with pytest.raises(SpecError, match="alibi_slopes has no gradient: pass it through"):
        jax.grad(call)(jnp.ones(4))

    short = Q.astype(jnp.float8_e4m3fn)
    with pytest.raises(SpecError, match="FP8 operands have no gradients in JAX"):
        jax.grad(lambda q: attention(q, short, short).astype(jnp.float32).sum())(Q)

    def twice(q: Any) -> Any:
        return jax.grad(lambda q: attention(q, Q, Q).astype(jnp.float32).sum())(q).sum()

    with pytest.raises(SpecError, match="no second derivative"):
        jax.eval_shape(jax.grad(twice), Q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, Q, Q), (Q,), (Q,))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ((0x1_0000_0002, -1), [2, 1, 0xFFFFFFFF, 0xFFFFFFFF]),
        (np.array([0x1_0000_0002, -1]), [2, 1, 0xFFFFFFFF, 0xFFFFFFFF]),
        (np.array([7, 8], np.uint32), [7, 8, 0, 0]),
        (np.array([7, 8, 9, 10], np.uint32), [7, 8, 9, 10]),
    ],
)
def test_state_of_dropout_has_many_forms(state: Any, words: list[int]) -> None:
    assert words_of_state(state).tolist() == words


def test_key_is_a_state_of_dropout() -> None:
    key = jax.random.key(5)
    assert words_of_state(key).tolist() == [*jax.random.key_data(key).tolist(), 0, 0]
    with pytest.raises(SpecError, match="rng_state needs a key"):
        words_of_state("seed")
    with pytest.raises(SpecError, match="got float32"):
        words_of_state(jnp.ones(2))


@pytest.mark.parametrize("heads", [1, 8, 12])
def test_slopes_of_alibi_are_those_of_torch(heads: int) -> None:
    assert np.array_equal(default_slopes(heads), default_alibi_slopes(heads).numpy())


def test_process_without_torch_calls_attention() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import jax.numpy as jnp\n"
        "from attngen.jax import attention\n"
        "q = jnp.ones((1, 2, 1, 8))\n"
        "print(attention(q, q, q, mask='causal').shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 2, 1, 8)", done.stderr


def test_windows_of_more_keys_than_integers_count_are_unbounded() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 9, 2, 16))
    found = attention(x, x, x, window=(1 << 40, 1 << 40))
    assert jnp.allclose(found, attention(x, x, x), atol=1e-6)
