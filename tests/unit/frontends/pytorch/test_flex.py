"""`attngen.flex_attention` beside PyTorch's, on the reference."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import attngen


def operands(heads: int = 2) -> list[torch.Tensor]:
    sizes = ((2, 4, 9, 16), (2, heads, 12, 16), (2, heads, 12, 8))
    return [torch.randn(size, generator=torch.Generator().manual_seed(n))
            for n, size in enumerate(sizes)]  # fmt: skip


def test_signature_has_the_parameters_of_pytorchs_in_their_order() -> None:
    ours = inspect.signature(attngen.flex_attention).parameters
    wanted = inspect.signature(theirs.flex_attention).parameters
    assert [*ours] == [*wanted, "options"]
    assert all(ours[name].default == each.default for name, each in wanted.items())


@pytest.mark.filterwarnings("ignore")  # of PyTorch's, which is not compiled here
def test_auxiliary_outputs_are_pytorchs() -> None:
    given = {"enable_gqa": True, "score_mod": lambda s, b, h, i, j: s + h}
    request = theirs.AuxRequest(lse=True)
    out, aux = attngen.flex_attention(*operands(), **given, return_aux=request)
    wanted, others = theirs.flex_attention(*operands(), **given, return_aux=request)
    assert isinstance(aux, theirs.AuxOutput) and aux.max_scores is None
    torch.testing.assert_close((out, aux.lse), (wanted, others.lse), atol=1e-5, rtol=1e-5)
    _, aux = attngen.flex_attention(*operands(), **given, return_aux=theirs.AuxRequest())
    assert aux == theirs.AuxOutput()


def test_further_options_go_to_attention_and_what_it_lacks_is_refused() -> None:
    out = attngen.flex_attention(*operands(4), window=(2, 0), kernel_options={"BLOCK_M": 64})
    assert torch.equal(out, attngen.attention(*operands(4), layout="bhsd", window=(2, 0)))
    with pytest.raises(attngen.SpecError, match="query has 4 heads and key 2.*enable_gqa=True"):
        attngen.flex_attention(*operands())
    with pytest.raises(attngen.SpecError, match="max_scores.*return_max_logit"):
        request = theirs.AuxRequest(max_scores=True)
        attngen.flex_attention(*operands(4), return_aux=request)
