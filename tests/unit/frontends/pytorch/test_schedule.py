"""Schedules that calls share: what a launch is told of them, and what is refused."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import SpecError
from attngen.call.numbers import Arguments
from attngen.call.schedule import Ordered, ordered_by, table_shape
from attngen.call.table import INPUTS
from attngen.fragments import features
from attngen.frontends.pytorch import backward, forward
from attngen.spec.resolve import resolve
from tests.unit.frontends.pytorch.test_varlen_op import (
    TOKENS,
    carriers,
    cumulative,
    int32,
    launches,
    optional,
)

__all__ = ["launches"]  # a fixture
CPU = torch.device("cpu")


MANY = 40  # sequences, of which none find their order themselves


def ordered(heads=4, sequences=MANY, layout="thd", deterministic=False):
    spec = attngen.AttentionSpec(head_dim=64, layout=layout, mask="causal")
    (problem,) = resolve(spec, features.scan())
    return Ordered(problem, deterministic, heads, heads, sequences)


def run_both(table, sequences=MANY):
    """Both operations on packed tokens, with a schedule's table."""
    q, k, v = carriers("thd")
    lengths = int32(*(min(n, TOKENS) for n in range(sequences + 1)))
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), lengths)
    rest = (*optional(**given, schedule=table), *Arguments(layout="thd", mask="causal"))
    out, lse, *_ = forward.forward(q, k, v, *rest)
    backward.backward(torch.zeros_like(out), None, q, k, v, out, lse, *rest)


def kept(launch):
    """Read what the kernel that orders sequences is told; None for other kernels."""
    names = [field.name for field in launch.kernel.fields]
    return launch.prepared.values[names.index("kept")] if "kept" in names else None


def test_op_with_a_table_keeps_each_order_in_a_part_of_its_own(launches):
    table = torch.zeros(table_shape(MANY), dtype=torch.int32)
    run_both(table)
    places = [
        {name: each.addresses[name] for name in each.kernel.workspace if name.endswith("schedule")}
        for each in launches
    ]
    parts = [table[n].data_ptr() for n in range(3)]
    assert places[0] == places[1] == {"q_schedule": parts[0]}
    assert {name: at for found in places[2:] for name, at in found.items()} == {
        "kv_schedule": parts[1]
    }
    assert [kept(each) for each in launches if kept(each) is not None] == [1, 1]


def test_op_without_a_table_orders_each_call_anew(launches):
    run_both(None)
    assert [kept(each) for each in launches if kept(each) is not None] == [0, 0]


@pytest.mark.parametrize("given", [False, True])
def test_op_of_few_sequences_has_no_order_before_its_kernels(launches, given):
    run_both(torch.zeros(table_shape(32), dtype=torch.int32) if given else None, 32)
    families = [each.kernel.entry.partition("__")[0] for each in launches]
    assert families == ["sm90_fwd", "bwd_prepare", "sm90_bwd", "bwd_convert"]
    for each in launches:
        names = [name for name in each.kernel.workspace if name.endswith("schedule")]
        assert all(each.addresses[name] == 0 for name in names)


@pytest.mark.parametrize(
    "table",
    [
        torch.zeros(3, 80, 4, dtype=torch.int32),
        torch.zeros(3, 81, 4, dtype=torch.int64),
        torch.zeros(3, 81, 8, dtype=torch.int32)[..., ::2],
    ],
)
def test_op_table_of_another_kind_is_refused(launches, table):
    with pytest.raises(SpecError, match=r"schedule needs contiguous int32 \[3, 81, 4\]"):
        run_both(table)
    assert not launches


def test_schedule_serves_equal_calls_with_one_table():
    schedule, lengths = attngen.Schedule(), (cumulative(), None)
    first = schedule.table_of(ordered(), lengths, CPU)
    assert first.shape == table_shape(MANY) and not first.any()
    first[0, 0, 0] = 7
    assert schedule.table_of(ordered(), lengths, CPU) is first
    assert schedule.table_of(ordered(), (lengths[0].view(-1), None), CPU) is first


@pytest.mark.parametrize(
    "other",
    [
        ordered(heads=8),
        ordered(sequences=3),
        ordered(layout="bshd"),
        ordered(deterministic=True),  # whose backward may have tiles of other sizes
    ],
)
def test_schedule_of_another_call_is_refused(other):
    schedule, lengths = attngen.Schedule(), (cumulative(),)
    schedule.table_of(ordered(), lengths, CPU)
    if other.problem.varlen:
        with pytest.raises(SpecError, match="another variant"):
            schedule.table_of(other, lengths, CPU)
    else:  # equal lengths need none
        assert schedule.table_of(other, lengths, CPU) is None


def test_schedule_of_few_sequences_has_no_table():
    schedule, few = attngen.Schedule(), ordered(sequences=32)
    assert schedule.table_of(few, (cumulative(),), CPU) is None
    with pytest.raises(SpecError, match="other lengths"):
        schedule.table_of(few, (int32(0, 1, TOKENS),), CPU)
    with pytest.raises(SpecError, match="another variant"):
        schedule.table_of(ordered(), (cumulative(),), CPU)
    schedule.reset()


def test_schedule_of_other_lengths_is_refused_until_reset():
    schedule = attngen.Schedule()
    table = schedule.table_of(ordered(), (cumulative(),), CPU)
    table.fill_(7)
    changed = (int32(0, 1, TOKENS),)
    with pytest.raises(SpecError, match="other lengths"):
        schedule.table_of(ordered(), changed, CPU)
    schedule.reset()
    assert schedule.table_of(ordered(), changed, CPU) is table and not table.any()


def test_call_is_ordered_by_its_problem_heads_and_sequences():
    q, k, v = carriers("thd")
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), cumulative())
    operands = (q, k, v, *optional(**given))
    assert len(operands) == len(INPUTS)
    found = ordered_by(operands, Arguments(layout="thd", mask="causal"))
    assert found.problem.masks == ("causal",) and found.problem.varlen
    assert (found.heads_q, found.heads_kv, found.sequences) == (q.shape[1], k.shape[1], 2)
    in_order = ordered_by(operands, Arguments(layout="thd", mask="causal", deterministic=True))
    assert in_order == found._replace(deterministic=True) != found
