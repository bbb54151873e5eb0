"""Train a small transformer in JAX twice, on attngen and on jax.nn's attention, and compare losses.

    python examples/04_train_jax.py

Both runs start from the same weights and read the same text, the standard library's source, byte by
byte, in bfloat16. Layers are scanned; of each the policy saves what attention names, so that no
forward of it runs twice. They fail where the losses of any step differ by more than TOLERANCE.
Without a GPU that has kernels both are short and run on definitions.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attngen.jax import attention
from jax import Array

LAYERS, WIDTH, HEADS_Q, HEADS_KV, HEAD_DIM = 4, 512, 8, 2, 64
HAS_KERNELS = jax.default_backend() == "gpu"
BATCH, LENGTH, STEPS = (8, 512, 200) if HAS_KERNELS else (2, 32, 3)
LEARNING_RATE, WARMUP = 6e-4, 20  # at its highest; steps until then
TOLERANCE = 0.02  # nats a byte
Weights = Any
Attend = Callable[[Array, Array, Array], Array]
ATTENTIONS: dict[str, Attend] = {
    "attngen": partial(attention, mask="causal"),  # type: ignore[dict-item]  # by-products apart
    "jax.nn": partial(jax.nn.dot_product_attention, is_causal=True),
}


def new_weights(key: Array) -> Weights:
    """Normal numbers, float32, of a size that keeps that of what they multiply."""
    shapes = {
        "heads": (WIDTH, (HEADS_Q + 2 * HEADS_KV) * HEAD_DIM),
        "out": (HEADS_Q * HEAD_DIM, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    keys = iter(jax.random.split(key, len(shapes) + 2))
    layers = {
        name: jax.random.normal(next(keys), (LAYERS, *shape)) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    tables = {"bytes": 256, "positions": LENGTH}
    found = {n: jax.random.normal(next(keys), (size, WIDTH)) * 0.02 for n, size in tables.items()}
    return {"layers": layers, **found}


def normed(x: Array) -> Array:
    """Rows of size 1."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def layer(attend: Attend, x: Array, weights: Weights) -> tuple[Array, None]:
    """Attention and a perceptron, each added to what came in."""
    own = {name: each.astype(x.dtype) for name, each in weights.items()}
    heads = (normed(x) @ own["heads"]).reshape(*x.shape[:2], -1, HEAD_DIM)
    q, k, v = jnp.split(heads, [HEADS_Q, HEADS_Q + HEADS_KV], axis=2)
    x = x + attend(q, k, v).reshape(*x.shape[:2], -1) @ own["out"]
    return x + jax.nn.gelu(normed(x) @ own["up"]) @ own["down"], None


def loss_of(weights: Weights, text: Array, attend: Attend) -> Array:
    """Nats a byte of text, int32 [b, LENGTH + 1]."""
    read, following = text[:, :-1], text[:, 1:]
    x = (weights["bytes"][read] + weights["positions"]).astype(jnp.bfloat16)
    saving = jax.checkpoint_policies.save_only_these_names("context")
    step = jax.checkpoint(partial(layer, attend), policy=saving)
    x, _ = jax.lax.scan(step, x, weights["layers"])
    logits = normed(x).astype(jnp.float32) @ weights["bytes"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], axis=-1)
    return -chosen.mean()


@partial(jax.jit, static_argnames="name", donate_argnums=(0, 1))
def train_step(weights: Weights, moments: Any, count: Array, text: Array, name: str) -> Any:
    """A step of Adam: weights and moments after it, and the loss before."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, text, ATTENTIONS[name])
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)
    rate = LEARNING_RATE * jnp.minimum(count / WARMUP, 1)
    up, wide = 1 / (1 - 0.9**count), 1 / (1 - 0.95**count)
    weights = jax.tree.map(
        lambda w, m, v: w - rate * m * up / (jnp.sqrt(v * wide) + 1e-8),
        *(weights, first, second),
    )
    return weights, (first, second), loss


def batches(steps: int) -> list[Array]:
    """Text of each step, int32 [BATCH, LENGTH + 1]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    numbers = np.frombuffer(data, np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    starts = random.integers(0, len(numbers) - LENGTH - 1, (steps, BATCH))
    return [jnp.asarray([numbers[n : n + LENGTH + 1] for n in each]) for each in starts]


def train(name: str, steps: int) -> list[float]:
    """Losses of each step, with the attention of that name."""
    weights = new_weights(jax.random.key(0))
    moments = jax.tree.map(jnp.zeros_like, (weights, weights))
    losses = []
    for number, text in enumerate(batches(steps)):
        count = jnp.float32(number + 1)
        weights, moments, loss = train_step(weights, moments, count, text, name)
        losses.append(loss)
    return [float(loss) for loss in losses]


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints, and returns 1 where losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args(arguments).steps
    found = {name: train(name, steps) for name in ATTENTIONS}
    pairs = [*zip(*found.values(), strict=True)]
    print(f"step    {'    '.join(found)}")
    for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        print(f"{step:4d}    {'    '.join(f'{loss:.4f}' for loss in pairs[step])}")
    apart = max(abs(one - other) for one, other in pairs)
    print(f"losses are {apart:.4f} nats apart at most; allowed: {TOLERANCE}")
    return int(apart > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
