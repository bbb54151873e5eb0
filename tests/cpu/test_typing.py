"""What type checkers see of `attngen.attention` has every argument, with the function's types."""

from __future__ import annotations

import inspect

import attngen
from attngen.ops.options import Options

OPERANDS = {"q", "k", "v"}
DECIDING = {"return_lse", "return_max_logit", "return_amax", "dropout_p"}  # what is returned


def test_options_are_the_arguments_that_do_not_decide_what_is_returned() -> None:
    parameters = inspect.signature(attngen.attention).parameters
    expected = {name: x.annotation for name, x in parameters.items()}
    for name in OPERANDS | DECIDING:
        del expected[name]
    found = {name: x.__forward_arg__ for name, x in Options.__annotations__.items()}
    assert found == expected
