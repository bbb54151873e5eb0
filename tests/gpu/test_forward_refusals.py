"""Bad input: every wrong argument is named by a SpecError before anything is launched."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import oracle

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_launched")]

NAN, INF = float("nan"), float("inf")


def make(*shape, dtype=torch.bfloat16, device=None):
    return torch.zeros(shape, dtype=dtype, device=device or oracle.DEVICE)


def sound(**changes):
    """q, k, v that a kernel takes, but for the changes."""
    plain = {"q": make(2, 9, 4, 64), "k": make(2, 7, 2, 64), "v": make(2, 7, 2, 64)}
    return {**plain, **changes}


# What is changed, and a word of the message.
OPERANDS = {
    "q rank 3": (lambda: {"q": make(9, 4, 64)}, r"\bq\b"),
    "q rank 5": (lambda: {"q": make(2, 9, 4, 64, 64)}, r"\bq\b"),
    "k rank 3": (lambda: {"k": make(7, 2, 64)}, r"\bk\b"),
    "v rank 5": (lambda: {"v": make(2, 7, 2, 64, 64)}, r"\bv\b"),
    "q scalar": (lambda: {"q": make()}, r"\bq\b"),
    "k missing": (lambda: {"k": None}, r"\bk\b"),
    "v missing": (lambda: {"v": None}, r"\bv\b"),
    "k and v missing": (lambda: {"k": None, "v": None}, r"\bk\b"),
    "k fp16": (lambda: {"k": make(2, 7, 2, 64, dtype=torch.float16)}, "dtype|float16"),
    "v fp16": (lambda: {"v": make(2, 7, 2, 64, dtype=torch.float16)}, r"\bv\b.*float16"),
    "all fp32": (lambda: {n: x.float() for n, x in sound().items()}, "fp32"),
    "all fp64": (lambda: {n: x.double() for n, x in sound().items()}, "fp64"),
    "all int16": (lambda: {n: x.to(torch.int16) for n, x in sound().items()}, "int16"),
    "q on the CPU": (lambda: {"q": make(2, 9, 4, 64, device="cpu")}, "cpu"),
    "k on the CPU": (lambda: {"k": make(2, 7, 2, 64, device="cpu")}, r"\bk\b.*cpu"),
    "v on the CPU": (lambda: {"v": make(2, 7, 2, 64, device="cpu")}, r"\bv\b.*cpu"),
    "head ratio": (lambda: {"q": make(2, 9, 3, 64)}, "heads"),
    "fewer q heads": (lambda: {"q": make(2, 9, 1, 64)}, "heads"),
    "no kv heads": (lambda: {"k": make(2, 7, 0, 64), "v": make(2, 7, 0, 64)}, "heads"),
    "k heads": (lambda: {"k": make(2, 7, 4, 64)}, "heads"),
    "k length": (lambda: {"k": make(2, 8, 2, 64)}, "length"),
    "q batch": (lambda: {"q": make(3, 9, 4, 64)}, "batch"),
    "kv batch": (lambda: {"k": make(1, 7, 2, 64), "v": make(1, 7, 2, 64)}, "batch"),
    "k head dim": (lambda: {"k": make(2, 7, 2, 72)}, "head dim"),
    "head dim": (lambda: {"q": make(2, 9, 4, 580), "k": make(2, 7, 2, 580)}, "head_dim"),
    "head dim of a prompt": (
        lambda: {"q": make(2, 99, 4, 584), "k": make(2, 7, 2, 584)},
        "head_dim",
    ),
    "v head dim": (lambda: {"v": make(2, 7, 2, 520)}, "head_dim_v"),
}

# Keyword arguments, and a word of the message.
ARGUMENTS = {
    **{f"scale {x}": ({"softmax_scale": x}, "scale") for x in (NAN, INF, 0.0, -0.1, 1e39)},
    "mask": ({"mask": "diagonal"}, "mask"),
    "mask padding": ({"mask": "padding_causal"}, "mask"),
    "mask arbitrary": ({"mask": "arbitrary"}, "mask"),
    "mask empty": ({"mask": ""}, "mask"),
    "mask suffix alone": ({"mask": "_bottom_right"}, "mask"),
    "mask suffix on none": ({"mask": "none_bottom_right"}, "mask"),
    "mask window": ({"mask": "window"}, "mask"),
    "layout": ({"layout": "bsdh"}, "layout"),
    "layout packed": ({"layout": "bs3hd"}, "layout"),
    "layout mixed": ({"layout": "bshd_sbhd_sbhd"}, "lengths"),
    "layout thd": ({"layout": "thd"}, "layout"),
    "layout paged": ({"layout": "paged_kv_bshd_bshd_bshd"}, "page_table"),
    "lengths int16": ({"seqused_kv": torch.tensor([3, 7], dtype=torch.int16)}, "int32"),
    "lengths of another batch": ({"seqused_q": torch.zeros(3, dtype=torch.int32)}, "seqused_q"),
    "softmax": ({"softmax": "softmin"}, "softmax"),
    **{
        f"window {x}": ({"window": x}, "window")
        for x in ((-2, 0), (0, -5), (1,), (1, 2, 3), (), ("a", 1), (1.5, 2), 5, (0, NAN))
    },
    "bottom_right": ({"mask": "causal_bottom_right", "bottom_right": False}, "bottom_right"),
    "backend": ({"backend": "gpu"}, "backend"),
    "bias_type": ({"bias_type": "post"}, "bias_type"),
    **{f"softcap {x}": ({"softcap": x}, "softcap") for x in (-1.0, NAN)},
    **{f"dropout {x}": ({"dropout_p": x}, "dropout") for x in (-0.5, 1.5, NAN)},
    **{f"num_splits {n}": ({"num_splits": n}, "num_splits") for n in (-2, 129, 2.0)},
    "score_mod of too few": ({"score_mod": lambda s, b, h, i: s}, "score_mod"),
    "mask_mod that branches": (
        {"mask_mod": lambda b, h, i, j: True if i >= j else i < 2},
        "mask_mod",
    ),
}

# Tensor arguments of features that kernels lack or the call did not ask for: never ignored.
TENSORS = {
    "sink": lambda: make(4, dtype=torch.float32),
    "page_table": lambda: make(2, 1, dtype=torch.int32),
}


def only_there(name):
    """The CPU is where operands are that the host takes for its device."""
    return pytest.param(name, marks=pytest.mark.device) if "CPU" in name else name


@pytest.mark.parametrize("name", map(only_there, OPERANDS))
def test_refusals_wrong_operand_is_named(name):
    changes, word = OPERANDS[name]
    with pytest.raises(attngen.SpecError, match=f"(?s){word}"):
        attngen.attention(**sound(**changes()), backend="cuda")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_refusals_wrong_argument_is_named(name):
    changes, word = ARGUMENTS[name]
    with pytest.raises(attngen.SpecError, match=word):
        attngen.attention(**sound(), **{"backend": "cuda", **changes})


@pytest.mark.parametrize("name", TENSORS)
def test_refusals_tensor_without_kernel_is_named(name):
    with pytest.raises(attngen.SpecError, match=name):
        attngen.attention(**sound(), **{name: TENSORS[name]()}, backend="cuda")


def test_refusals_several_violations_are_told_at_once():
    with pytest.raises(attngen.SpecError) as caught:
        attngen.attention(**sound(), mask="diagonal", softmax="softmin", backend="cuda")
    assert len(caught.value.reasons) == 2


@pytest.mark.parametrize(
    "layout, mask",
    [("thd", "none"), ("bs3hd", "none"), ("bshd_sbhd_sbhd", "none"), ("x", "none"), ("bshd", "x")],
)
def test_refusals_operation_called_directly_refuses_too(layout, mask):
    tensors = sound().values()
    with pytest.raises(attngen.SpecError):
        torch.ops.attngen.forward(*tensors, layout=layout, mask=mask)


def test_refusals_auto_takes_the_reference_and_logs_why(caplog):
    q, k, v = oracle.operands(1, 2, 2, 9, 9, 580)
    with caplog.at_level("WARNING", logger="attngen"):
        out = attngen.attention(q, k, v, mask="causal", backend="auto")
    expected = attngen.attention(q, k, v, mask="causal", backend="reference")
    assert torch.equal(out, expected)
    assert "head_dim 580" in caplog.text
