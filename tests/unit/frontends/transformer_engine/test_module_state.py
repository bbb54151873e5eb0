"""`te.DotProductAttention`: state, checkpoints, random states, autograd's function, refusals."""

from __future__ import annotations

import inspect
import io
import warnings
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import attngen
from attngen import SpecError, te
from tests.support import te_kit
from tests.support.te_kit import Case, Shape, arguments, close, module_of, of_module, rows_of

CACHE = SimpleNamespace(reads_pages=False, max_batch_size=1)


def test_sinks_are_state_where_they_are_learned() -> None:
    vanilla, off, learned = (module_of(Case(softmax=x)) for x in te.SoftmaxType)
    assert vanilla.softmax_offset is None
    assert isinstance(learned.softmax_offset, torch.nn.Parameter)
    assert not off.softmax_offset.any() and off.softmax_offset.shape == (4,)
    assert [*off.state_dict()] == ["_extra_state"]
    assert {*learned.state_dict()} == {"softmax_offset", "_extra_state"}
    off.softmax_offset.requires_grad_()
    off(*te_kit.operands(Case())).sum().backward()
    assert off.softmax_offset.grad.any()


def test_attributes_that_change_are_noticed() -> None:
    """By a module that has planned such calls, and by copies of it."""
    case = Case(mask="causal")
    module, qkv = module_of(case), te_kit.operands(case)
    before = module(*qkv)
    copied = deepcopy(module)
    assert torch.equal(copied(*qkv), before)
    copied.softmax_scale = module.softmax_scale = 0.1
    after = module(*qkv)
    assert torch.equal(copied(*qkv), after) and not torch.equal(before, after)
    expected = te.DotProductAttention(4, 8, 2, qkv_format="bshd", softmax_scale=0.1)(*qkv)
    assert torch.equal(after, expected)
    assert te.DotProductAttention(4, 8, softmax_scale=0.0).softmax_scale == 0
    module.attention_dropout = 0.5
    assert not torch.equal(module(*qkv), after)
    assert torch.equal(module.eval()(*qkv), after)


def test_windows_may_be_lists() -> None:
    case = Case(mask="causal", window=(3, 0))
    module, qkv = module_of(case), te_kit.operands(case)
    expected = module(*qkv, window_size=(3, 0))
    assert torch.equal(module(*qkv, window_size=[3, 0]), expected)


def test_state_of_fp8_scales_survives() -> None:
    module, other = module_of(Case()), module_of(Case())
    assert not module.state_dict()["_extra_state"].numel()
    state = torch.arange(5, dtype=torch.uint8)
    other.load_state_dict({"_extra_state": state})
    assert torch.equal(other.state_dict()["_extra_state"], state)
    for given in (b"\x01\x02", io.BytesIO(b"\x01\x02")):
        other.set_extra_state(given)
        assert other.get_extra_state().tolist() == [1, 2]
    for nothing in (None, b"", torch.empty(0, dtype=torch.uint8)):
        other.set_extra_state(nothing)
        assert not other.get_extra_state().numel()


def test_state_of_older_versions_is_found_under_its_name() -> None:
    layer = torch.nn.ModuleDict({"core_attention": module_of(Case())})
    state = torch.arange(3, dtype=torch.uint8)
    layer.load_state_dict({"core_attention.fused_attention._extra_state": state})
    assert torch.equal(layer["core_attention"].get_extra_state(), state)
    layer.load_state_dict({})  # of attention that had none


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("inside", [True, False])
def test_activation_checkpointing(inside: bool, dropout: float) -> None:
    case = Case(mask="causal", dropout=dropout, bias_type="post_scale_bias")
    module, bias = module_of(case), te_kit.bias_of(case).requires_grad_()
    results = []
    for recomputed in (False, True):
        q, k, v = (x.requires_grad_() for x in te_kit.operands(case))
        bias.grad = None
        torch.manual_seed(3)
        given = arguments(case) | {"core_attention_bias": bias}
        if not recomputed:
            out = module(q, k, v, **given)
        elif inside:
            out = module(q, k, v, checkpoint_core_attention=True, **given)
        else:
            out = checkpoint(lambda *x, **y: module(*x, **y), q, k, v, use_reentrant=False, **given)
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad, bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_draws_from_the_tracker() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    case = Case(mask="causal", dropout=0.5)
    module, qkv = module_of(case, get_rng_state_tracker=lambda: tracker), te_kit.operands(case)
    start = tracker.get_states()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = module(*qkv), module(*qkv)
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(first, second)
    tracker.set_states(start)
    assert torch.equal(module(*qkv), first)
    tracker.set_states(start)
    q, k, v = (x.requires_grad_() for x in qkv)
    out = module(q, k, v, checkpoint_core_attention=True)
    now = tracker.get_states()["model-parallel-rng"]
    out.sum().backward()
    assert torch.equal(out, first) and torch.equal(tracker.states_["model-parallel-rng"], now)
    tracker.set_states(start)
    gradient = q.grad.clone()
    module(*(x.detach() for x in (q, k, v)))
    q.grad = None
    tracker.set_states(start)
    module(q, k, v).sum().backward()
    assert torch.equal(q.grad, gradient)


def test_tracker_refuses_what_it_has() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(RuntimeError, match="seed 1"):
        tracker.add("b", 1)
    with pytest.raises(RuntimeError, match="'a'"):
        tracker.add("a", 2)
    with pytest.raises(KeyError, match="'c'"), tracker.fork("c"):
        pass


def test_saved_tensors_go_through_hooks() -> None:
    """A packed base is saved, and so moved, once."""
    shape = Shape().self_attention
    case = of_module(Case("bshd_bshd_bshd", "causal", shape=shape))
    module = module_of(case)
    packed = torch.stack(te_kit.operands(case), -3).requires_grad_()
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        te.FusedAttnFunc.apply(*function_arguments(case, packed))
    assert sum(x.untyped_storage().data_ptr() == packed.data_ptr() for x in saved) == 1
    with save_on_cpu():
        out = module(qkv_layer=packed)
    out.sum().backward()
    again = packed.grad.clone()
    packed.grad = None
    module(qkv_layer=packed).sum().backward()
    assert torch.equal(packed.grad, again)


def function_arguments(case: Case, packed: Tensor) -> list[Any]:
    """Arguments of `FusedAttnFunc.apply` for a packed tensor, by position."""
    q, k, v = packed.unbind(-3)
    s = case.shape
    full = te_kit.cumulative([s.queries] * s.batch)
    return [
        True, s.queries, s.queries, full, full, None, None, None, None, q, k, v, None, None, 0.0,
        True, "bs3hd", "no_bias", case.mask, "vanilla", (-1, 0), None, None,
        te.FusedAttnBackend.F16_arbitrary_seqlen, False, False, {}, {}, False, None, False, False,
        1, False, packed, None,
    ]  # fmt: skip


def test_function_of_autograd_gives_a_packed_tensor_its_gradient() -> None:
    case = Case("bs3hd", "causal", shape=Shape().self_attention)
    packed = torch.stack(te_kit.operands(case), -3).requires_grad_()
    out = te.FusedAttnFunc.apply(*function_arguments(case, packed.detach().requires_grad_()))
    given = function_arguments(case, packed)
    given[9:12] = [x.detach() for x in given[9:12]]
    found = te.FusedAttnFunc.apply(*given)
    assert torch.equal(found, out)
    found.square().sum().backward()
    gradient = packed.grad.clone()
    packed.grad = None
    module_of(case, qkv_format="bshd")(qkv_layer=packed).square().sum().backward()
    close(gradient, packed.grad)


def test_function_of_autograd_has_gradients_of_biases_and_sinks() -> None:
    case = Case("bshd_bshd_bshd", "padding", softmax="learnable", bias_type="post_scale_bias")
    q, k, v = (x.requires_grad_() for x in te_kit.operands(case))
    bias, offset = te_kit.bias_of(case).requires_grad_(), te_kit.offset_of(case).requires_grad_()
    ends = [te_kit.cumulative(x) for x in case.lengths()]
    out, logits = te.FusedAttnFunc.apply(
        True, 6, 9, *ends, None, None, None, None, q, k, v, bias, None, 0.0, True, case.layout,
        case.bias_type, case.mask, case.softmax, (-1, -1), False, None, 1, False, False, None, None,
        False, offset, False, False, 1, True,
    )  # fmt: skip
    assert not logits.requires_grad
    d_o = te_kit.randn(*out.shape, seed=9)
    found = torch.autograd.grad(out, [q, k, v, bias, offset], d_o)
    module = module_of(replace(case, bottom_right=False))
    expected = module(q, k, v, core_attention_bias=bias, **arguments(case))
    learned = [q, k, v, bias, module.softmax_offset]
    for one, other in zip(
        found, torch.autograd.grad(expected, learned, d_o.flatten(-2)), strict=True
    ):
        close(one.flatten(), other.flatten(), 1e-6)


@pytest.mark.parametrize("kind", ["fused", "flash", "unfused"])
def test_backends_are_modules_of_their_own(kind: str) -> None:
    case = of_module(Case("thd_thd_thd", "padding_causal"))
    qkv, dense = te_kit.operands(case), te_kit.dense(case)
    given = dict(
        qkv_layout=case.layout, attn_mask_type=case.mask, max_seqlen_q=6, max_seqlen_kv=9,
        **{name: x for name, x in arguments(case).items() if name.startswith("cu_")},
    )  # fmt: skip
    kinds = {
        "fused": te.FusedAttention, "flash": te.FlashAttention,
        "unfused": te.UnfusedDotProductAttention,
    }  # fmt: skip
    core = kinds[kind](8**-0.5)
    if kind == "fused":
        with pytest.raises(ValueError, match="No_Backend"):
            core(*qkv, **given)
        given["fused_attention_backend"] = te.FusedAttnBackend.F16_arbitrary_seqlen
    out = core({}, *qkv, **given) if kind == "unfused" else core(*qkv, **given)
    close(rows_of(case, out), te_kit.truth(case, dense)[0])


@pytest.mark.parametrize(
    ("mask", "given", "window", "warns"),
    [
        ("causal", None, (-1, 0), False),
        ("causal", (-1, -1), (-1, 0), True),
        ("causal", (-1, 0), (-1, 0), False),
        ("causal", (3, 0), (3, 0), False),
        ("padding_causal", (3, 2), (3, 0), True),
        ("causal_bottom_right", (3, -1), (3, 0), True),
        ("causal", (-1, 2), AssertionError, False),
        ("causal", (-2, 0), AssertionError, False),
        ("no_mask", None, (-1, -1), False),
        ("padding", (-1, -1), (-1, -1), False),
        ("arbitrary", (-1, 0), (-1, -1), True),
        ("no_mask", (0, 4), (0, 4), False),
        ("no_mask", (-1, 4), AssertionError, False),
        ("no_mask", (4, -1), AssertionError, False),
        ("some", None, AssertionError, False),
    ],
)
def test_windows(mask: str, given: Any, window: Any, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(window, tuple):
            assert te.check_set_window_size(mask, given) == window
        else:
            with pytest.raises(window):
                te.check_set_window_size(mask, given)
    assert bool(caught) == warns


def test_signatures() -> None:
    made = inspect.signature(te.DotProductAttention.__init__).parameters
    assert [*made][:4] == ["self", "num_attention_heads", "kv_channels", "num_gqa_groups"]
    assert made["qkv_format"].default == "sbhd" and made["attn_mask_type"].default == "causal"
    called = [*inspect.signature(te.DotProductAttention.forward).parameters]
    assert called[1:6] == [
        "query_layer",
        "key_layer",
        "value_layer",
        "attention_mask",
        "qkv_format",
    ]
    assert called[-3:] == ["qkv_layer", "kv_layer", "qkv_interleave_dim"]


@pytest.mark.parametrize(
    ("made", "called", "error", "message"),
    [
        ({}, {"score_mod": len}, SpecError, "score_mod"),
        ({"kv_channels": 16}, {}, SpecError, "head dim of queries and keys: 8, of the module 16"),
        ({"num_gqa_groups": 4}, {}, SpecError, "key/value heads: 2, of the module 4"),
        ({"num_gqa_groups": 3}, {}, AssertionError, "multiple"),
        ({"attention_type": "both"}, {}, AssertionError, "attention_type"),
        ({"softmax_type": "hard"}, {}, KeyError, "hard"),
        ({"attn_mask_type": "padding"}, {}, SpecError, "cu_seqlens_q and cu_seqlens_kv"),
        ({}, {"qkv_format": "bhsd"}, AssertionError, "qkv_format='bhsd'"),
        ({}, {"qkv_format": "thd"}, AssertionError, "padding mask"),
        ({}, {"inference_params": CACHE}, AssertionError, "padding mask"),
        ({}, {"value_layer": None}, SpecError, "pass query_layer"),
        ({}, {"qkv_layer": torch.zeros(1)}, SpecError, "pass it alone"),
        ({}, {"kv_layer": torch.zeros(1)}, SpecError, "with query_layer alone"),
        ({}, {"kv_layer": torch.zeros(1), "qkv_interleave_dim": 1}, SpecError, "allowed: -3, -2"),
        ({}, {"nothing": 1}, TypeError, "'nothing'"),
        ({}, {"alibi_slopes": torch.ones(4)}, AssertionError, "core_attention_bias_type is alibi"),
        ({}, {"core_attention_bias_type": "post_scale_bias"}, SpecError, "bias is None"),
        ({}, {"core_attention_bias_type": "some"}, KeyError, "some"),
        (
            {},
            {"core_attention_bias_type": "alibi", "core_attention_bias": torch.zeros(1)},
            AssertionError,
            "no core_attention_bias",
        ),
    ],
    ids=str,
)
def test_refusals(
    made: dict[str, Any], called: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k, v = te_kit.operands(Case())
    given: dict[str, Any] = dict(
        num_attention_heads=4, kv_channels=8, num_gqa_groups=2, qkv_format="bshd"
    )
    with pytest.raises(error, match=message):
        module = te.DotProductAttention(**given | made)
        module(**{"query_layer": q, "key_layer": k, "value_layer": v} | called)


def test_calls_over_a_context_parallel_group_are_those_of_attngen(monkeypatch: Any) -> None:
    case = Case(mask="causal")
    module, qkv = module_of(case), te_kit.operands(case)
    groups, calls = [object(), object()], []
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 1)
    module.set_context_parallel_group(groups, [0, 1], None, "a2a+p2p")
    assert module.cp_group is groups and module.cp_comm_type == "a2a+p2p"
    alone = module(*qkv)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 2)
    module.set_context_parallel_group(groups, [0, 1], None, "a2a+p2p")

    def attend(q: Any, k: Any, v: Any, group: Any, comm: str, **given: Any) -> Any:
        calls.append((group, comm, given))
        return attngen.attention(q, k, v, **given, backend="reference")

    monkeypatch.setattr("attngen.frontends.pytorch.parallel.attention", attend)
    assert torch.allclose(module(*qkv), alone, atol=1e-5)
    ((group, comm, given),) = calls
    assert group is groups and comm == "a2a+p2p" and given["mask"] == "causal"
    with pytest.raises(SpecError, match="needs cu_seqlens_q"):
        module(*qkv, attn_mask_type="padding_causal")
    with pytest.raises(SpecError, match="score_mod is not served over"):
        module(*qkv, score_mod=lambda *_: None)
    ends = torch.tensor([0, 3, 7, 8], dtype=torch.int32)
    module(*qkv, attn_mask_type="padding", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    _, (_, _, padded) = calls
    assert padded["seqused_kv"].tolist() == [3, 4, 1] and padded["mask"] == "none"

