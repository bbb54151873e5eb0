"""Arguments that are no tensors, numbers or functions are refused by name, like all others."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen
from attngen.errors import SpecError

Q = torch.randn(2, 6, 4, 8)
ROW = np.ones(4, dtype=np.float32)
TENSORS = [
    *("attn_mask", "bias", "sink", "rng_state", "cu_seqlens_q", "cu_seqlens_kv"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "seqused_q", "seqused_kv", "page_table"),
    "alibi_slopes",
]
OTHERS = {
    "softmax_scale": ["0.1", torch.ones(2), 1j, [0.1], ROW, np.array(1j)],
    "softcap": ["30", {}, np.ones((1, 1))],
    "dropout_p": [None, "0.5"],
    "max_seqlen_q": ["8", ROW],
    "page_table": [(ROW, ROW), (None, None)],
    "score_mod": [3],
    "mask_mod": ["causal"],
    "block_mask": [3, torch.ones(6, 6)],
    "window": [(True, 0), ([1], 0)],
    "bottom_right": [[True]],
    "deterministic": [[True], "no"],
    "return_lse": [[]],
    "return_max_logit": [{}],
    "return_amax": [()],
    "schedule": [True, torch.ones(2, dtype=torch.int32)],
}


@pytest.mark.parametrize("backend", ["auto", "cuda", "reference"])
@pytest.mark.parametrize("wrong", [None, [[1.0]], ROW, "q"], ids=["None", "list", "array", "str"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_operand_that_is_no_tensor_is_refused_by_name(name, wrong, backend) -> None:
    operands = {"q": Q, "k": Q, "v": Q, name: wrong}
    with pytest.raises(SpecError, match=f"(?m)(^| ){name}[ ;].*got "):
        attngen.attention(**operands, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("wrong", [ROW, [1.0, 2.0], 3.0], ids=["array", "list", "number"])
@pytest.mark.parametrize("name", TENSORS)
def test_argument_that_is_no_tensor_is_refused_by_name(name, wrong, backend) -> None:
    with pytest.raises(SpecError, match=f"^{name} needs"):
        attngen.attention(Q, Q, Q, **{name: wrong}, backend=backend)


@pytest.mark.parametrize(
    "name, wrong", [(name, wrong) for name, values in OTHERS.items() for wrong in values], ids=str
)
def test_argument_of_a_wrong_type_is_refused_by_name(name, wrong) -> None:
    with pytest.raises(SpecError, match=f"^{name} needs"):
        attngen.attention(Q, Q, Q, **{name: wrong})


@pytest.mark.parametrize("backend", ["auto", "cuda", "reference"])
@pytest.mark.parametrize("bias", [None, torch.ones(6, 6)], ids=["bare", "bias"])
@pytest.mark.parametrize("name", ["layout", "mask", "softmax", "bias_type"])
def test_choice_without_a_hash_is_refused_like_any_other(name, bias, backend) -> None:
    for wrong in ([["none"]], {"none": 1}, (["none"], 0)):
        with pytest.raises(SpecError, match=f"^{name}=.*Use one of"):
            attngen.attention(Q, Q, Q, bias=bias, **{name: wrong}, backend=backend)
    with pytest.raises(SpecError, match="^backend="):
        attngen.attention(Q, Q, Q, bias=bias, backend=[backend])


@pytest.mark.parametrize("found", [None, True, 1.5, (torch.ones(()),), torch.ones(3)], ids=repr)
@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_function_that_returns_no_number_is_refused_by_name(name, found) -> None:
    with pytest.raises(SpecError, match=f"^{name} needs to return one number.*; got "):
        attngen.attention(Q, Q, Q, **{name: lambda *_: found})


def test_wrong_types_are_refused_all_at_once() -> None:
    with pytest.raises(SpecError) as refusal:
        attngen.attention(Q, Q, Q, bias=ROW, softcap="1", seqused_kv=[6, 6])
    assert [reason.split()[0] for reason in refusal.value.reasons] == [
        *("bias", "seqused_kv", "softcap")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_numbers_may_be_symbolic_in_a_trace(name) -> None:
    def call(q: torch.Tensor, number: float) -> torch.Tensor:
        return attngen.attention(q, q, q, **{name: number})

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for number in (0.5, 0.25):
        assert torch.allclose(compiled(Q, number), call(Q, number), atol=1e-6)


def test_refusal_is_in_the_report_of_a_trace_that_must_be_whole() -> None:
    compiled = torch.compile(lambda q: attngen.attention(q, q, q, bias=3), fullgraph=True)
    with pytest.raises(Exception, match="SpecError.*bias needs a tensor"):
        compiled(Q)


@pytest.mark.parametrize(
    "arguments",
    [
        {"softmax_scale": np.float32(0.3), "softcap": torch.tensor(30.0)},
        {"softmax_scale": 1, "max_seqlen_q": np.int64(6)},
        {"block_mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 6, 6, "cpu")},
        {"alibi_slopes": False, "score_mod": lambda s, *_: s},
    ],
    ids=["numpy and torch", "int64", "block_mask", "score_mod"],
)
def test_numbers_and_functions_of_other_packages_are_taken(arguments) -> None:
    assert attngen.attention(Q, Q, Q, **arguments).shape == Q.shape
