"""Recipes of FP8 in JAX: how scales follow from largest magnitudes, of now or of steps before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...call.fp8_scales import BACKWARDS, delayed_violations
from ...call.table import CARRIERS
from ...errors import SpecError
from ...spec.scaling import SCALINGS
from .fp8 import current_scale, delayed_scale

FORMATS = {
    "HYBRID": ("float8_e4m3fn", "float8_e5m2"),
    "E4M3": ("float8_e4m3fn", "float8_e4m3fn"),
}


class Formats:
    """Part of a recipe that has an `fp8_format`, a key of `FORMATS`."""

    fp8_format: str

    @property
    def dtypes(self) -> tuple[str, str]:
        """Names of the dtypes of q, k and v, and of the output's gradient."""
        return FORMATS[self.fp8_format]


@dataclass(frozen=True)
class Float8CurrentScaling(Formats):
    """Scales of each array's own largest magnitude.

    fp8_format: HYBRID has the output's gradient in e5m2, E4M3 in e4m3 as q, k and v.
    use_power_2_scales: the next power of two below; amax_epsilon: the least magnitude that is
    taken. scaling: tensor, or token, a scale a token and head, by which under a causal mask no
    later token changes a bit of an earlier output. backward: in which bits gradients are made, 16,
    fp8, or fp8_or_16, which has 16 where kernels have none of 8, and beside scales a token; in 8
    bits the scale of dS is a bound's, which nothing exceeds.

    Raises: SpecError with every violation at once.
    """

    fp8_format: str = "HYBRID"
    use_power_2_scales: bool = True
    amax_epsilon: float = 0.0
    backward: str = "16"
    scaling: str = "tensor"

    def __post_init__(self) -> None:
        reasons = _violations(self)
        if self.scaling not in SCALINGS:
            reasons.append(f"scaling needs {', '.join(SCALINGS)}; got {self.scaling!r}")
        if self.by_token and self.backward == "fp8":
            reasons.append(
                "scaling='token' has gradients in 16 bits: sums over tokens, which those in 8 are, "
                f"leave no token's scale behind them; got backward={self.backward!r}. Pass '16'."
            )
        if not 0 <= self.amax_epsilon < float("inf"):
            reasons.append(f"amax_epsilon needs a number >= 0; got {self.amax_epsilon!r}")
        if reasons:
            raise SpecError(reasons)

    @property
    def by_token(self) -> bool:
        """Whether each token and head has a scale."""
        return self.scaling == "token"

    def scale(self, amax: Array, dtype: str) -> Array:
        """Scales of arrays with these largest magnitudes, float32."""
        return current_scale(amax, dtype, self.use_power_2_scales, self.amax_epsilon)


@dataclass(frozen=True)
class DelayedScaling(Formats):
    """Scales of the largest magnitudes in the steps before, which a `Float8Scales` holds.

    An array's first step, of which there is no history, takes its own largest magnitude. margin:
    binades left free above it. fp8_format, backward: as of `Float8CurrentScaling`; the scale of dS
    is a bound's. amax_history_len: steps that are remembered. amax_compute_algo: the largest of
    these (max), that of the step before (most_recent), or a function of the history, float32
    [amax_history_len, n], that returns [n].

    Raises: SpecError with every violation at once.
    """

    margin: int = 0
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Array], Array] = "max"
    backward: str = "16"
    by_token = False  # of the whole array in each step

    def __post_init__(self) -> None:
        reasons = _violations(self)
        given = self.margin, self.amax_history_len, self.amax_compute_algo
        reasons += delayed_violations(*given)
        if reasons:
            raise SpecError(reasons)

    def scale(self, amax: Array, dtype: str) -> Array:
        """Scales of arrays with these largest magnitudes, float32; 1 where there is none."""
        return delayed_scale(amax, dtype, 1.0, self.margin)

    def amax_of(self, history: Array) -> Array:
        """The magnitudes that the next scales are made from, [n]. history: [steps, n], the newest
        first."""
        if callable(self.amax_compute_algo):
            return self.amax_compute_algo(history)
        if self.amax_compute_algo == "max":
            return history.max(0)
        return jax.lax.index_in_dim(history, 0, keepdims=False)


Recipe = Float8CurrentScaling | DelayedScaling


def _violations(recipe: Recipe) -> list[str]:
    """Faults of the fields that recipes share."""
    reasons = []
    if recipe.fp8_format not in FORMATS:
        reasons.append(f"fp8_format needs HYBRID or E4M3; got {recipe.fp8_format!r}")
    if recipe.backward not in BACKWARDS:
        reasons.append(f"backward needs {', '.join(BACKWARDS)}; got {recipe.backward!r}")
    return reasons


class Float8Scales(NamedTuple):
    """State of delayed scaling of one layer, a pytree that a program holds beside its parameters.

    scale: of q, k and v, float32 [3], 0 before the first step; amax_history: float32 [steps, 3],
    the step that runs first. gradient_scale, gradient_history: of the output's gradient, [1] and
    [steps, 1].
    """

    scale: Array
    amax_history: Array
    gradient_scale: Array
    gradient_history: Array

    @classmethod
    def begin(cls, recipe: DelayedScaling) -> Float8Scales:
        """The state of a layer before its first step."""
        steps, count = recipe.amax_history_len, len(CARRIERS)
        shapes = (count,), (steps, count), (1,), (steps, 1)
        return cls(*[jnp.zeros(shape, jnp.float32) for shape in shapes])

    def noted(self, amax: Array) -> Float8Scales:
        """With the magnitudes of a call, [3], in the step that runs."""
        return self._replace(amax_history=self.amax_history.at[:1].max(amax))

    def with_gradients(self, found: Float8Scales) -> Float8Scales:
        """With what backwards noted. found: the gradient of a loss by this state, whose
        `gradient_history` has it."""
        history = jnp.maximum(self.gradient_history, found.gradient_history)
        return self._replace(gradient_history=history)

    def end_step(self, recipe: DelayedScaling, axes: str | Sequence[str] = ()) -> Float8Scales:
        """The state of the next step: scales follow from histories, which a new row enters.

        axes: of the mesh, whose devices share their maxima, inside `jax.shard_map`.
        """
        forward, backward = recipe.dtypes
        shared = [*[axes] * isinstance(axes, str), *([] if isinstance(axes, str) else axes)]
        made: list[Array] = []
        for scale, history, dtype in (
            (self.scale, self.amax_history, forward),
            (self.gradient_scale, self.gradient_history, backward),
        ):
            if shared:
                history = history.at[:1].set(jax.lax.pmax(history[:1], tuple(shared)))
            found = delayed_scale(recipe.amax_of(history), dtype, scale, recipe.margin)
            made += [found, jnp.roll(history, 1, 0).at[:1].set(0)]
        return Float8Scales(*made)


def check_scales(recipe: Recipe, scales: Any) -> None:
    """Raises: SpecError where a recipe needs scales, or has none, or those of another history."""
    if not isinstance(recipe, DelayedScaling):
        if scales is not None:
            raise SpecError("scales belong to a DelayedScaling. Leave them out.")
        return
    if not isinstance(scales, Float8Scales):
        raise SpecError(
            f"DelayedScaling needs scales, a Float8Scales; got {type(scales).__name__}. Begin with "
            "Float8Scales.begin(recipe)."
        )
    steps, *_ = scales.amax_history.shape
    if steps != recipe.amax_history_len:
        raise SpecError(f"scales keep {steps} steps, the recipe {recipe.amax_history_len}")
