"""Gradients that kernels do not have, of described calls."""

from __future__ import annotations

import pytest

from attngen.call.gradient_checks import gradient_violations, no_gradient
from attngen.call.numbers import Arguments
from attngen.call.table import INPUTS
from attngen.call.tensors import TensorDesc

BF16 = TensorDesc.contiguous((2, 30, 4, 64), "bfloat16")
E4M3 = TensorDesc.contiguous((2, 30, 4, 64), "float8_e4m3fn")
WIDE = TensorDesc.contiguous((2, 30, 4, 576), "bfloat16")
COLUMN = TensorDesc.contiguous((1, 4, 30, 1), "bfloat16")
PAGES = TensorDesc.contiguous((2, 3), "int32")


def violations(learns: bool = False, out_dtype: str | None = None, **given: TensorDesc) -> str:
    named = {"q": BF16, "k": BF16, "v": BF16, **given}
    operands = [named.get(name) for name in INPUTS]
    found = gradient_violations(operands, Arguments(out_dtype=out_dtype), learns)
    return "; ".join(found)


def test_plain_call_has_its_gradients() -> None:
    assert not violations() and not violations(bias=COLUMN)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"k": E4M3, "v": E4M3}, "none in FP8"),
        ({"q": E4M3}, "none in FP8"),
        ({"out_dtype": "float32"}, "none of a float32 output"),
        ({"page_table_k": PAGES}, "pages are inference only"),
        ({"v": WIDE}, "head dims above 512"),
        ({"bias": COLUMN, "learns": True}, "one column for 30 keys"),
    ],
    ids=["8-bit keys", "8-bit queries", "output", "pages", "wide heads", "column"],
)
def test_call_without_gradients_says_why(given: dict[str, TensorDesc], reason: str) -> None:
    assert reason in violations(**given)  # type: ignore[arg-type]


def test_column_of_unknown_size_is_left_to_the_run() -> None:
    operands = [{"bias": COLUMN}.get(name, BF16 if name in "qkv" else None) for name in INPUTS]
    assert not [*gradient_violations(operands, Arguments(), True, lambda *_: False)]


def test_operands_say_whether_they_have_gradients() -> None:
    assert no_gradient("q") is None and no_gradient("sink") is None
    assert "alibi_slopes has no gradient" in (no_gradient("alibi_slopes") or "")
    assert "operands of fragments" in (no_gradient("fragment_0") or "")
