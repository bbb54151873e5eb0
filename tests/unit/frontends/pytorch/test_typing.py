"""What type checkers see of `attngen.attention` has every argument, with the function's types."""

from __future__ import annotations

import inspect

import pytest
import torch

import attngen
from attngen.frontends.pytorch.options import Options
from attngen.spec.attention_spec import CALL_ARGUMENTS

OPERANDS = {"q", "k", "v"}
DECIDING = {"return_lse", "return_max_logit", "return_amax", "dropout_p"}  # what is returned


def test_options_are_the_arguments_that_do_not_decide_what_is_returned() -> None:
    parameters = inspect.signature(attngen.attention).parameters
    expected = {name: x.annotation for name, x in parameters.items()}
    for name in OPERANDS | DECIDING:
        del expected[name]
    found = {name: x.__forward_arg__ for name, x in Options.__annotations__.items()}
    assert found == expected


def test_from_call_knows_every_argument_and_refuses_others() -> None:
    assert {*CALL_ARGUMENTS} == inspect.signature(attngen.attention).parameters.keys() - OPERANDS
    q = torch.zeros(1, 200, 1, 8)
    with pytest.raises(attngen.SpecError, match="'maks'"):
        attngen.AttentionSpec.from_call(q, q, q, maks="causal")


def test_from_call_compiles_without_a_break() -> None:
    def head_dim(q: torch.Tensor) -> torch.Tensor:
        return q * attngen.AttentionSpec.from_call(q, q, q, mask="causal", window=(3, 0)).head_dim

    q = torch.ones(1, 200, 1, 8)
    assert torch.compile(head_dim, fullgraph=True, backend="eager")(q)[0, 0, 0, 0] == 8
