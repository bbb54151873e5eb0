"""Modules of this package, found without importing any of them."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterator


def modules_of(package: str) -> Iterator[str]:
    """The package `attngen.<package>` and every module below it, without the first part of its
    name. Packages among them are imported, as the search goes through them."""
    spec = importlib.util.find_spec(f"attngen.{package}")
    yield package
    places = None if spec is None else spec.submodule_search_locations
    for found in pkgutil.iter_modules(places or ()):
        name = f"{package}.{found.name}"
        yield from modules_of(name) if found.ispkg else (name,)
