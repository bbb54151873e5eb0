"""Errors cross the boundaries of processes: pickled or copied they say what they said."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest

from attngen import errors
from attngen.errors import AttngenError, CompilerMissing


def kinds(of: type[AttngenError] = AttngenError) -> Iterator[type[AttngenError]]:
    yield of
    for kind in of.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from kinds(kind)


MADE = [
    CompilerMissing("NVRTC"),
    CompilerMissing("NVRTC", "does not load"),
    *(
        kind(reasons)
        for kind in kinds()
        if kind is not CompilerMissing
        for reasons in ("one", [], ["one", "another\nof two lines"])
    ),
]
WAYS: list[Callable[[AttngenError], AttngenError]] = [
    *(lambda error, p=p: pickle.loads(pickle.dumps(error, p)) for p in range(6)),
    copy.copy,
    copy.deepcopy,
]


@pytest.mark.parametrize("error", MADE, ids=repr)
def test_error_pickled_or_copied_is_the_same(error: AttngenError) -> None:
    error.__dict__["note"] = ["kept"]
    for way in WAYS:
        for found in (way(error), way(way(error))):
            assert type(found) is type(error)
            assert (str(found), found.reasons, found.args) == (
                str(error),
                error.reasons,
                error.args,
            )
            assert found.__dict__ == error.__dict__


def test_every_error_of_the_package_is_covered() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert {type(error) for error in MADE} == defined
