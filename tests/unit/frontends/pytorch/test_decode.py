"""Calls with pages or few queries: what reaches the operation, computed by the reference here."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import attngen
from attngen import AttentionSpec, SpecError, reference
from attngen.call import checks
from attngen.call.decode import OWN_NUMBER
from attngen.call.numbers import Arguments
from attngen.call.operands import extents_of, spec_of
from attngen.call.table import OPTIONAL
from attngen.call.tensors import name_of
from attngen.fragments import features
from attngen.frontends.pytorch import checked_call
from attngen.frontends.pytorch import routing as choice
from attngen.frontends.pytorch.signature import split
from attngen.spec import resolve
from attngen.spec.layouts import parse
from tests.support.caches import FORWARD, forget
from tests.support.fp8_kit import keywords_of

PAGED = [f"paged_kv_{q}_{kv}_{kv}" for q in ("bshd", "sbhd", "thd") for kv in ("bshd", "sbhd")]
LENGTHS = (11, 0, 16)


def pages(layout=PAGED[0], d=16, page=8, dtype=torch.bfloat16):
    """k, v and a table of its own for v, whose rows are wider than needed."""
    make = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, page, 2, d, generator=make).to(dtype) for _ in "kv")
    tables = [torch.randperm(9, generator=make).int().reshape(3, 3) for _ in "kv"]
    if parse(layout).kv_format == "sbhd":
        k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    return k, v, tuple(tables)


def call(layout=PAGED[0], **changes):
    """Arguments of a call of 3 sequences with 2 queries each, or 1, 3 and 2 packed ones."""
    axes = parse(layout).q_format
    sizes = {"b": 3, "s": 2, "t": 6, "h": 4, "d": 16}
    make = torch.Generator().manual_seed(1)
    q = torch.randn([sizes[axis] for axis in axes], generator=make).to(torch.bfloat16)
    k, v, tables = pages(layout)
    arguments = {"q": q, "k": k, "v": v, "layout": layout, "page_table": tables[0]}
    arguments |= {"seqused_kv": torch.tensor(LENGTHS, dtype=torch.int32)}
    if axes == "thd":
        arguments["cu_seqlens_q"] = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    return {**arguments, **changes}


@pytest.fixture
def on_reference(monkeypatch):
    """The CPU passes for a device with kernels: the operation checks, and the reference computes.
    Yields what reached it."""
    calls = []

    def forward(q, k, v, *rest):
        optional, arguments = split(rest)
        named = dict(zip(OPTIONAL, optional, strict=True))
        tensors = {"q": q, "k": k, "v": v, "o": q}
        extents = extents_of(tensors, arguments.layout)
        if reasons := checks.violations(tensors, extents, named, arguments, False):
            raise SpecError(reasons)
        calls.append((spec_of(q, k, v, named, arguments), arguments))
        with torch.no_grad():
            out, aux = reference.attention(
                q, k, v, layout=arguments.layout, mask=arguments.mask,
                bottom_right=arguments.bottom_right, **keywords_of(optional),
            )  # fmt: skip
        empty = q.new_empty(0, dtype=torch.float32)
        return out, aux.lse, empty, empty.clone(), empty.clone()

    monkeypatch.setattr(choice, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(checked_call, "unobserved", lambda tensors: False)
    forget(monkeypatch, *FORWARD)
    library = torch.library.Library("attngen", "IMPL")
    library.impl("forward", forward, "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("mask", ["none", "causal_bottom_right"])
def test_paged_call_equals_the_reference(on_reference, layout, mask):
    given = call(layout, mask=mask)
    want, want_aux = attngen.attention(**given, return_lse=True, backend="reference")
    for splits in (None, 3):
        for _ in range(2):  # checked, then settled
            out, aux = attngen.attention(
                **given, num_splits=splits, return_lse=True, backend="cuda"
            )
            assert torch.equal(out, want) and torch.equal(aux.lse, want_aux.lse)
    assert [arguments.num_splits for _, arguments in on_reference] == [0, 0, 3, 3]
    assert all(spec.decode for spec, _ in on_reference)


@pytest.mark.parametrize("kind", [tuple, list])
def test_paged_call_takes_a_table_each_for_k_and_v(on_reference, kind):
    _, _, tables = pages()
    for given in (tables, tables[::-1]):
        arguments = call(page_table=kind(given))
        out = attngen.attention(**arguments, backend="cuda")
        assert torch.equal(out, attngen.attention(**arguments, backend="reference"))


def test_known_paged_calls_differ_in_tables_lengths_and_splits(on_reference):
    k, v, (table, other) = pages()
    variants = [
        {},
        {"page_table": other},
        {"page_table": (table, other)},
        {"page_table": table[:, :2].contiguous(), "seqused_kv": torch.tensor([1, 2, 3]).int()},
        {"num_splits": 2},
        {"k": v, "v": k},
    ]
    for changes in [*variants, *variants]:
        given = call(**changes)
        out = attngen.attention(**given, backend="cuda")
        given.pop("num_splits", None)
        assert torch.equal(out, attngen.attention(**given, backend="reference"))


def test_known_paged_call_vouches_for_no_list_of_one_table(on_reference):
    given = call()
    attngen.attention(**given, backend="cuda")
    with pytest.raises(SpecError, match="one or \\(for K, for V\\)"):
        attngen.attention(**{**given, "page_table": [given["page_table"]]}, backend="cuda")


@pytest.mark.parametrize("splits", [-2, 0, 129, 1 << 40, 2.0, True, "2"])
@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_call_with_no_number_of_splits_is_refused(on_reference, splits, backend):
    with pytest.raises(SpecError, match="num_splits"):
        attngen.attention(**call(num_splits=splits), backend=backend)


@pytest.mark.parametrize("splits", [-2, 129])
def test_op_with_no_number_of_splits_is_refused(on_reference, splits):
    q = torch.randn(1, 1, 1, 8).bfloat16()
    rest = (*(None for _ in OPTIONAL), *Arguments(num_splits=splits))
    with pytest.raises(SpecError, match="num_splits"):
        torch.ops.attngen.forward(q, q, q, *rest)


def test_call_whose_keys_no_kernel_splits_refuses_splits(on_reference):
    q = torch.randn(6, 1, 8).bfloat16()
    ends = torch.tensor([0, 6], dtype=torch.int32)
    given = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends, "backend": "cuda"}
    given["out_dtype"] = torch.float32
    for splits in (1, OWN_NUMBER):
        attngen.attention(q, q, q, **given, num_splits=splits)
    with pytest.raises(SpecError, match="num_splits=2"):
        attngen.attention(q, q, q, **given, num_splits=2)


@pytest.mark.parametrize("page", [1, 4, 12, 48])
def test_pages_of_any_size_reach_the_operation(on_reference, page):
    k, v, (table, _) = pages(page=page)
    lengths = torch.tensor([1, 2, 3], dtype=torch.int32)
    given = call(k=k, v=v, page_table=table, seqused_kv=lengths)
    out = attngen.attention(**given, backend="cuda")
    assert torch.equal(out, attngen.attention(**given, backend="reference"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_table": torch.zeros(3, 3, dtype=torch.int16)},
        {"page_table": torch.zeros(2, 3, dtype=torch.int32)},
        {"page_table": (torch.zeros(3, 3, dtype=torch.int32),) * 3},
        {"page_table": None},
        {"seqused_kv": None},
        {"layout": "bshd"},
    ],
    ids=lambda wrong: str([*wrong]),
)
def test_paged_call_without_a_proper_table_is_refused(on_reference, wrong):
    with pytest.raises(SpecError):
        attngen.attention(**call(**wrong), backend="cuda")
    assert not on_reference


def test_paged_call_that_wants_a_gradient_is_refused_after_one_that_does_not(on_reference):
    given = call()
    attngen.attention(**given, backend="cuda")
    given["q"].requires_grad_()
    with pytest.raises(SpecError, match="inference only"):
        attngen.attention(**given, backend="cuda")
    with torch.no_grad():
        attngen.attention(**given, backend="cuda")


def test_values_are_checked_where_that_is_asked_for(on_reference, monkeypatch):
    given = call(page_table=torch.full((3, 3), 9, dtype=torch.int32))  # of pages 0 to 8
    _, _, (table, _) = pages()
    monkeypatch.setattr(choice, "CHECK_VALUES", True)
    for _ in range(2):
        with pytest.raises(SpecError, match=r"page_table\[0, 0\]=9, of 9 pages; allowed: 0..8"):
            attngen.attention(**given, backend="cuda")
    long = torch.tensor([25, 1, 1], dtype=torch.int32)
    with pytest.raises(SpecError, match="room for 24 positions"):
        attngen.attention(**{**given, "page_table": table, "seqused_kv": long}, backend="cuda")
    attngen.attention(**{**given, "page_table": table}, backend="cuda")
    assert len(on_reference) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_paged_call_compiled_whole_equals_the_eager_one(on_reference, backend):
    torch._dynamo.reset()

    def model(q, k, v, table, lengths):
        return attngen.attention(
            q, k, v, layout=PAGED[0], page_table=table, seqused_kv=lengths, num_splits=2,
            backend="cuda",
        ).float()  # fmt: skip

    given = call()
    arguments = [given[name] for name in ("q", "k", "v", "page_table", "seqused_kv")]
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
        assert torch.equal(compiled(*arguments), model(*arguments))


def dense(s_q, heads=(4, 2), **changes):
    q = torch.randn(2, s_q, heads[0], 16).bfloat16()
    return {"q": q, "k": q[:, :, : heads[1]], "v": q[:, :, : heads[1]], **changes}


def packed(**changes):
    ends, q = torch.tensor([0, 1, 3], dtype=torch.int32), torch.randn(3, 4, 16).bfloat16()
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return {"q": q, "k": q[:, :2], "v": q[:, :2], "layout": "thd", **lengths, **changes}


@pytest.mark.parametrize(
    ("given", "few"),
    [
        (dense(1), True),
        (dense(32), True),  # 64 rows with the heads of a group
        (dense(33), False),
        (dense(64, (1, 1)), False),  # a head has a tile of its own either way
        (dense(64, (1, 1), out_dtype=torch.bfloat16, num_splits=1), True),
        (dense(33, num_splits=1), True),
        (dense(1, seqused_q=torch.tensor([1, 0], dtype=torch.int32)), True),
        (dense(1, out_dtype=torch.float32), False),
        (call(), True),
        (call("paged_kv_thd_sbhd_sbhd"), True),
        (packed(), False),  # which kernels split where they are asked to
        (packed(num_splits=1), True),
        (packed(num_splits=OWN_NUMBER), True),
        (packed(num_splits=OWN_NUMBER, out_dtype=torch.float32), False),
        ({"q": torch.randn(2, 20, 3, 1, 16).bfloat16(), "layout": "bs3hd"}, False),
        ({"q": torch.randn(2, 65, 3, 1, 16).bfloat16(), "layout": "bs3hd"}, False),
        ({"q": torch.randn(2, 40, 3, 2, 136).bfloat16(), "layout": "bs3hd"}, True),
        (
            {
                "q": torch.randn(2, 20, 8, 16).bfloat16(),
                "k": torch.randn(2, 90, 2, 2, 16).bfloat16(),
                "layout": "bshd_bs2hd",
            },
            False,
        ),
    ],
)
def test_spec_of_a_call_is_the_one_whose_kernels_it_reaches(given, few):
    """So that what is built from the call is what the call finds."""
    named = {"k": None, "v": None, **given}
    spec = AttentionSpec.from_call(**named)
    assert spec.decode == few
    optional = dict.fromkeys(OPTIONAL) | {k: v for k, v in given.items() if k in OPTIONAL}
    asked = {k: v for k, v in given.items() if k in Arguments._fields}
    if "out_dtype" in asked:
        asked["out_dtype"] = name_of(asked["out_dtype"])
    arguments = Arguments(**asked)
    q, k, v = attngen.spec.layouts.unpack(
        parse(arguments.layout), named["q"], named["k"], named["v"]
    )
    known = features.scan()
    reached = spec_of(q, k, v, optional, arguments)
    assert reached.decode == few
    assert resolve.resolve(spec, known) == resolve.resolve(reached, known)


@pytest.mark.parametrize(
    "beside", [{"bias_type": "pre_scale"}, {"softcap": 1.0}, {"dropout_p": 0.5}]
)
def test_spec_of_a_call_beside_few_queries_is_the_one_that_it_reaches(beside):
    given = dense(1, **beside)
    asked = {k: v for k, v in beside.items() if k in Arguments._fields}
    tensors = [given[name] for name in "qkv"]
    reached = spec_of(*tensors, dict.fromkeys(OPTIONAL), Arguments(**asked))
    assert AttentionSpec.from_call(**given).decode == reached.decode == ("dropout_p" not in beside)


@pytest.mark.parametrize("more", ["bias", "attn_mask", "dropout"])
def test_few_queries_over_pages_beside_what_splits_leave_out_reach_the_forward(on_reference, more):
    """Any length reaches it, up to the pages' room or longer."""
    given = call()
    for keys in (24, 30, 1):
        sizes = (3, 1, 2, keys)
        beside = {
            "bias": {"bias": torch.randn(sizes).to(torch.bfloat16)},
            "attn_mask": {"attn_mask": torch.rand(sizes) < 0.7},
            "dropout": {"dropout_p": 0.25, "rng_state": torch.tensor([1, 2])},
        }[more]
        out = attngen.attention(**given, **beside, backend="cuda")
        if more != "dropout":  # the operation that stands in drops nothing
            assert torch.equal(out, attngen.attention(**given, **beside, backend="reference"))
        spec, _ = on_reference[-1]
        asked, known = AttentionSpec.from_call(**given, **beside), features.scan()
        assert not spec.decode and resolve.resolve(asked, known) == resolve.resolve(spec, known)
    with pytest.raises(SpecError, match="split keys have none of it"):
        attngen.attention(**given, **beside, num_splits=2, backend="cuda")


@pytest.mark.parametrize(
    ("device", "which"), [("cpu", "^cpu has no kernels"), ("cuda:1", r"^cuda:1 \(sm_75\) has no")]
)
def test_device_without_kernels_is_refused_with_what_it_is(device, which, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    q = SimpleNamespace(device=torch.device(device))
    (reason,) = choice.refusals(reference.AttentionCall(q=q))
    assert re.search(which, reason) and "sm_90a" in reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize("traced", [True, False])
def test_splits_that_no_kernel_makes_are_the_references_to_ignore(monkeypatch, traced, caplog):
    """A trace says so, too, rather than the run."""
    monkeypatch.setattr(choice, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(choice, "_logged", set())
    q = torch.randn(6, 2, 16).bfloat16()
    ends = torch.tensor([0, 1, 4, 6], dtype=torch.int32)

    def attend(q, backend):
        named = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        named["out_dtype"] = torch.float32
        return attngen.attention(q, q, q, **named, num_splits=2, backend=backend)

    call = attend
    if traced:
        torch._dynamo.reset()
        call = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(call(q, "auto"), attend(q, "reference"))
    with pytest.raises(Exception, match="num_splits=2: kernels split the keys of plain"):
        call(q, "cuda")
