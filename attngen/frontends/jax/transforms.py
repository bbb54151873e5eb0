"""The operations under JAX's transformations: jit, vmap, and shardings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
from jax import Array
from jax.custom_batching import custom_vmap

from ...call.operands import sequences_of, unpacked
from ...call.table import OPTIONAL
from ...errors import SpecError
from .folding import Fold
from .manual_axes import spread, varying
from .operation import Form
from .partitioning import partitioned
from .program import ordered

FORMS_KEPT = 4096


@lru_cache(FORMS_KEPT)
def operation(form: Form) -> Any:
    """The function of a form's operands that computes it, in any transformation but derivatives,
    which it refuses."""
    compiled = jax.jit(partitioned(form))
    mappable = custom_vmap(lambda *operands: compiled(*operands))
    mappable.def_vmap(partial(_mapped, form))
    refusing = jax.custom_jvp(lambda *operands: mappable(*operands))
    refusing.defjvp(_refuse_tangents)

    def run(*operands: Array) -> list[Array]:
        axes = varying(operands)  # which primitives and shardings do not hand on
        return [spread(x, axes) for x in refusing(*operands)]

    return run


def _refuse_tangents(*_: Any) -> Any:
    raise SpecError(
        "kernels have no second derivative, and none in forward mode; pass backend='reference'"
    )


def _mapped(
    form: Form, size: int, mapped: Sequence[bool], *operands: Array
) -> tuple[list[Array], list[bool]]:
    """The results of a mapped call: of one call of all its elements where there is such a one."""
    of_element = [
        jax.ShapeDtypeStruct(x.shape[1:] if own else x.shape, x.dtype)
        for x, own in zip(operands, mapped, strict=True)
    ]
    known = form.by_name([x for _, x in form.descriptions(of_element)])
    q, _, _ = unpacked(known["q"], known["k"], known["v"], form.arguments.layout)
    optional = {name: known[name] for name in OPTIONAL}
    sequences = sequences_of(q, optional, form.arguments.layout)
    by_name = dict(zip(form.names, mapped, strict=True))
    fold = Fold(form, size, by_name, sequences)
    if not fold.possible:
        made = _one_by_one(form, mapped, operands)
        return made, [True] * len(made)
    given = fold.operands(dict(zip(form.names, operands, strict=True)))
    names = ordered(given)
    whole = form._replace(names=names)
    folded = [given[name] for name in names]
    results = dict(zip(whole.results(folded), operation(whole)(*folded), strict=True))
    shapes = {name: x.shape for name, x in form.results(of_element).items()}
    made = fold.results(results, shapes)
    return made, [True] * len(made)


def _one_by_one(form: Form, mapped: Sequence[bool], operands: Sequence[Array]) -> list[Array]:
    """The results of calls one after another."""
    own = [x for x, each in zip(operands, mapped, strict=True) if each]

    def one(values: list[Array]) -> list[Array]:
        rest = iter(values)
        given = [next(rest) if each else x for x, each in zip(operands, mapped, strict=True)]
        return operation(form)(*given)  # type: ignore[no-any-return]

    made: list[Array] = jax.lax.map(one, own)
    return made
