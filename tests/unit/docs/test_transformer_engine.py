"""docs/guide/transformer-engine.md: its code runs, its tables say what is so."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen import fp8, te
from attngen.frontends.transformer_engine import environment
from attngen.frontends.transformer_engine.kernels import Question
from tests.support import te_kit
from tests.support.paths import ROOT
from tests.support.te_kit import Case, Shape, close, rows_of

PAGE = (ROOT / "docs" / "guide" / "transformer-engine.md").read_text()
FOLDER = Path(inspect.getfile(te)).parent
PLAIN = Question(
    True, torch.bfloat16, torch.bfloat16, "bshd_bshd_bshd", "no_bias", "no_mask", "vanilla", 0.0, 4,
    2, 6, 9, 8, 8, -1, -1, False, False, False,
)  # fmt: skip


def table(heading: str) -> list[str]:
    """First cells of the rows of the first table below a heading."""
    below = PAGE.split(f"## {heading}\n")[1]
    return [line.split("|")[1].strip() for line in re.findall(r"^\|.*", below, re.MULTILINE)]


def rows_refused(of_modules: bool = False) -> list[dict[str, Any]]:
    """Rows of what is refused elsewhere, in functions' words or in those of modules."""
    below = PAGE.split("## What its fused attention refuses\n")[1].split("\n## ")[0]
    parts = below.split("\nAnd in modules")
    cells = re.findall(r"^\| `(\w+=[^`]*)` \|", parts[of_modules], re.MULTILINE)
    return [eval(f"dict({cell})") for cell in cells]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Names that the page's code defines."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, names)
    return names


def test_module_of_the_page(page: dict[str, Any]) -> None:
    page["attention"].train()
    q = te_kit.randn(2, 7, 4, 64, seed=1, dtype=torch.bfloat16)
    k, v = (te_kit.randn(2, 7, 2, 64, seed=n, dtype=torch.bfloat16) for n in (2, 3))
    out = page["attend"](q, k, v, torch.tensor([7, 3]))
    assert out.shape == (2, 7, 256) and not out[1, 3:].any() and out[1, :3].any()


def test_functions_of_the_page(page: dict[str, Any]) -> None:
    case = Case("bs3hd", "causal", shape=Shape().self_attention)
    q, k, v = te_kit.operands(case)
    d_o = te_kit.randn(*q.shape, seed=5)
    o, *gradients = page["fused"](q, k, v, d_o)
    leaves = [x.requires_grad_() for x in te_kit.dense(case)]
    expected, _, _ = te_kit.truth(case, tuple(leaves))
    close(o.transpose(1, 2), expected)
    expected.backward(d_o.transpose(1, 2))
    for found, leaf in zip(gradients, leaves, strict=True):
        close(found.transpose(1, 2), leaf.grad)


def test_fp8_of_the_page(page: dict[str, Any]) -> None:
    q, k, v, d_o = (te_kit.randn(1, 7, 4, 64, seed=n, dtype=torch.bfloat16) for n in range(1, 5))
    out = page["train"](q, k, v)
    assert isinstance(out, fp8.Float8Tensor) and out.shape == (1, 7, 256)
    found = page["fused_in_fp8"](q, k, v, d_o)
    expected = page["fused"](q, k, v, d_o)
    for got, wanted in zip(found, expected, strict=True):
        assert isinstance(got, fp8.Float8Tensor)
        assert (got.dequantize() - wanted).norm() < 0.2 * wanted.norm()


@pytest.mark.parametrize(
    "given",
    [
        {"mask_type": "causal", "window_left": 64, "window_right": 0},
        {"softmax_type": "learnable"},
        {"bias_type": "alibi", "mask_type": "causal"},
        {"qkv_layout": "thd_thd_thd", "mask_type": "padding_causal"},
    ],
    ids=str,
)
def test_fp8_that_is_refused_elsewhere_has_kernels(given: dict[str, Any]) -> None:
    dtypes = dict.fromkeys(("q_dtype", "kv_dtype"), torch.float8_e4m3fn)
    question = replace(PLAIN, **dtypes, head_dim_qk=128, head_dim_v=128, **given)
    values = [getattr(question, name) for name in question.__dataclass_fields__]
    assert te.get_fused_attn_backend(*values) == te.FusedAttnBackend.FP8


def test_steps_of_the_page(page: dict[str, Any]) -> None:
    attention, step = page["attention"].eval(), page["step"]
    q = te_kit.randn(2, 5, 4, 64, seed=1, dtype=torch.bfloat16)
    k, v = (te_kit.randn(2, 5, 2, 64, seed=n, dtype=torch.bfloat16) for n in (2, 3))
    with torch.no_grad():
        whole = page["attend"](q, k, v, torch.tensor([5, 5]))
        first = step(*(x[:, :4] for x in (q, k, v)), {10: 4, 11: 4})
        last = step(*(x[:, 4:] for x in (q, k, v)), {10: 1, 11: 1})
    torch.testing.assert_close(torch.cat([first, last], 1), whole, atol=1e-2, rtol=1e-2)
    assert not attention.training


def test_rows_of_the_table_are_many() -> None:
    assert len(rows_refused()) == 14


@pytest.mark.parametrize("given", rows_refused(), ids=str)
def test_refused_elsewhere_is_computed_here(given: dict[str, Any]) -> None:
    """Kernels serve it in both directions, and by the definition it is right."""
    question = replace(PLAIN, **given)
    values = [getattr(question, name) for name in question.__dataclass_fields__]
    assert te.get_fused_attn_backend(*values) == te.FusedAttnBackend.F16_arbitrary_seqlen
    queries, keys = question.max_seqlen_q, question.max_seqlen_kv
    case = Case(
        "bshd_bshd_bshd",
        question.mask_type,
        (question.window_left, question.window_right),
        bias_type=question.bias_type,
        softmax=question.softmax_type,
        dropout=question.p_dropout,
        shape=Shape(
            queries=queries, keys=keys, dim=question.head_dim_qk, dim_v=question.head_dim_v,
            q_lengths=(queries, 4, 1), kv_lengths=(keys, 5, 3),
        ),
        bottom_right=question.mask_type not in ("causal", "padding_causal"),
    )  # fmt: skip
    module = te_kit.module_of(case)
    module.deterministic = question.deterministic
    bias = te_kit.bias_of(case)
    torch.manual_seed(5)
    out = module(*te_kit.operands(case), core_attention_bias=bias, **te_kit.arguments(case))
    torch.manual_seed(5)
    state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64)
    expected, _, _ = te_kit.truth(case, te_kit.dense(case), bias, te_kit.offset_of(case), state)
    close(rows_of(case, out), expected)


def test_rows_of_modules_are_many() -> None:
    assert len(rows_refused(of_modules=True)) == 5


@pytest.mark.parametrize("given", rows_refused(of_modules=True), ids=str)
def test_modules_compute_what_is_refused_elsewhere(given: dict[str, Any]) -> None:
    """Fused, as they choose where there are kernels; by the definition output and gradients are
    right, in FP8 nearly."""
    params = replace(te.AttentionParams(qkv_layout="bshd_bshd_bshd"), **given)
    assert te.get_attention_backend(params).use_fused_attention
    case = Case(
        params.qkv_layout, params.attn_mask_type.replace("arbitrary", "no_mask"),
        params.window_size or (-1, -1), bias_type=params.core_attention_bias_type,
        bias_shape=params.core_attention_bias_shape or "1hss", softmax=params.softmax_type,
        shape=Shape(dim=16, dim_v=16), bottom_right=True,
    )  # fmt: skip
    dtype = torch.bfloat16 if params.fp8 else torch.float64
    hidden, words = None, te_kit.arguments(case)
    if params.attn_mask_type == "arbitrary":
        hidden = te_kit.randn(case.shape.batch, 1, 6, 9, seed=3) > 0.4
        words["attention_mask"] = hidden
    qkv = [x.requires_grad_() for x in te_kit.operands(case, dtype=dtype)]
    exact = [x.double().requires_grad_() for x in te_kit.dense(case, dtype)]
    biases = [te_kit.bias_of(case) for _ in range(2)]
    learned = [x.requires_grad_() for x in biases if x is not None]
    module = te_kit.module_of(case, attn_mask_type=params.attn_mask_type)
    with fp8.autocast(params.fp8, params.fp8_meta and params.fp8_meta["recipe"]):
        out = module(*qkv, core_attention_bias=biases[0], **words)
    wanted, _, _ = te_kit.truth(
        case, tuple(exact), biases[1], te_kit.offset_of(case), hidden=hidden
    )
    found = rows_of(case, out)
    found.double().square().sum().backward()
    wanted.square().sum().backward()
    q, q64 = qkv[0].grad, exact[0].grad
    assert q is not None and q64 is not None
    axes = "thd" if "thd" in case.layout else "bshd"
    pairs = [(found, wanted), (te_kit.restored(q, axes, case.lengths()[0], 6), q64)]
    pairs += [(learned[0].grad, learned[1].grad)] if learned else []
    for got, expected in pairs:
        error = (got.double() - expected).norm() / expected.norm()
        assert error < (0.25 if params.fp8 else 1e-9)


def test_every_variable_that_is_read_is_on_the_page() -> None:
    code = "".join(x.read_text() for x in FOLDER.glob("*.py") if x.stem != "names")
    read = {*re.findall(r"\"(NVTE_\w+)\"", code)}
    assert read == {*re.findall(r"NVTE_\w+", Path(environment.__file__).read_text())}
    named = {*re.findall(r"NVTE_\w+", " ".join(table("Which backend computes a call")))}
    idle = {"NVTE_APPLY_QK_LAYER_SCALING", "NVTE_FUSED_ATTN_USE_FAv2_BWD"}
    idle.add("NVTE_FUSED_ATTN_BACKEND")
    assert named == read | idle


def test_names_of_the_page_are_there() -> None:
    names = {*re.findall(r"\bte\.(\w+)", PAGE)}
    assert len(names) > 15 and [name for name in names if not hasattr(te, name)] == []


# ---- the rows of "What differs" that no other test of the front end has


def test_random_state_moves_with_dropout_alone() -> None:
    q, k, v = te_kit.operands(Case())
    module = te_kit.module_of(Case(mask="causal"))
    before = torch.get_rng_state()
    module(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)
    te_kit.module_of(Case(mask="causal", dropout=0.5))(q, k, v)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dropout", [0.3, 0.001, 0.999])
def test_dropout_is_rounded_and_its_scale_too(dropout: float) -> None:
    """V of ones makes each output the weights that are kept, and their factor."""
    shape = Shape(batch=1, heads=1, groups=1, queries=64, keys=64)
    module = te_kit.module_of(Case(dropout=dropout, shape=shape), attn_mask_type="no_mask")
    q = torch.zeros(1, 64, 1, 8, dtype=torch.float64)
    eye = torch.eye(64, dtype=torch.float64).view(1, 64, 1, 64)
    module.hidden_size_per_attention_head_v = 64
    kept = module(q, q, eye)[0] * 64
    rounded = min(max(round(dropout * 256), 1), 255) / 256
    assert {round(x, 9) for x in kept.unique().tolist()} <= {0.0, round(1 / (1 - rounded), 9)}


def test_rows_that_see_nothing_are_zeros() -> None:
    case = Case(mask="causal_bottom_right", shape=Shape(queries=9, keys=6), bottom_right=True)
    out = te_kit.module_of(case)(*te_kit.operands(case))
    assert not out[:, :3].any() and out[:, 3:].any()
