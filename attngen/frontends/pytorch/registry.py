"""Registration: operators of torch that may be defined once in a process, however often their
modules are imported."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.library import Library

from .torch_private import withdraw

NAMESPACE = "attngen"
_PLACE = "_attngen_registered"  # where a module that is removed and imported again finds it


class _Registered(NamedTuple):
    """Registrations that an import of an operator's module left with torch."""

    schema: str
    definition: Library
    implementations: Library


def operator(name: str, schema: str) -> Library:
    """The library that takes the implementations of `attngen::name`, which is defined as the schema
    says, `(Tensor q, …) -> …`.

    Those of an earlier import are withdrawn, so that the newest code serves whoever calls the
    operator; its definition is kept where it is the same, since others may hold on to it.
    """
    registered: dict[str, _Registered] = vars(torch.ops.attngen).setdefault(_PLACE, {})
    known = registered.pop(name, None)
    if known is not None:
        withdraw(known.implementations)
    if known is not None and known.schema == schema:
        definition = known.definition
    else:
        if known is not None:
            withdraw(known.definition)
        definition = Library(NAMESPACE, "FRAGMENT")
        definition.define(name + schema)
    registered[name] = _Registered(schema, definition, Library(NAMESPACE, "IMPL"))
    return registered[name].implementations
