"""`out` and `out_layout`: where outputs lie, on any backend and in traces."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

import attngen
from attngen import SpecError
from attngen.call.memory import order_of, share_bytes
from attngen.call.tensors import TensorDesc, ordered_strides
from attngen.frontends.pytorch import into

GENERATOR = torch.Generator().manual_seed(0)
VIEW = torch.randn(2, 5, 3, 8, generator=GENERATOR).transpose(1, 2)  # [b, h, s, d]
HEADS: dict[str, Any] = {"layout": "bhsd", "backend": "reference"}


def attend(**given: Any) -> torch.Tensor:
    return attngen.attention(VIEW, VIEW, VIEW, **{**HEADS, **given})


def test_output_is_contiguous_unless_it_is_to_lie_like_q() -> None:
    plain, like_q = attend(), attend(out_layout="like_q")
    assert plain.is_contiguous() and like_q.stride() == VIEW.stride()
    assert torch.equal(plain, like_q)
    with pytest.raises(SpecError, match="out_layout='like_k'; allowed: contiguous, like_q"):
        attend(out_layout="like_k")


@pytest.mark.parametrize("layout", ["contiguous", "like_q"])
def test_traces_know_how_outputs_lie(layout: str) -> None:
    with torch.device("meta"):
        fake = torch.empty(2, 5, 3, 8, dtype=torch.float16).transpose(1, 2)
    given = {"memory": "0213,0213,0213" if layout == "like_q" else "", "layout": "bhsd"}
    out, lse, *_ = torch.ops.attngen.forward(fake, fake, fake, **given)
    assert (out.stride() == fake.stride()) == (layout == "like_q")
    rest = (out, lse)
    *carriers, _, _, _ = torch.ops.attngen.backward(out, None, fake, fake, fake, *rest, **given)
    assert [x.stride() == fake.stride() for x in carriers] == [layout == "like_q"] * 3


@pytest.mark.slow
def test_compiled_code_lays_outputs_out_and_writes_them_there() -> None:
    where = torch.zeros(2, 3, 5, 8)

    def code() -> torch.Tensor:
        attend(out=where)
        return attend(out_layout="like_q").mul(1)

    found = torch.compile(code, backend="aot_eager", fullgraph=True)()
    assert found.stride() == VIEW.stride() and torch.equal(where, found)


@pytest.mark.parametrize(
    ("shape", "order"), [((2, 3, 4, 5), "0213"), ((3, 2, 4), "102"), ((1, 1, 1, 8), "0123")]
)
def test_strides_of_an_order_have_that_order_and_no_gaps(shape: Any, order: str) -> None:
    desc = TensorDesc.ordered(shape, order, "float16")
    assert order_of(desc) == order
    turned = torch.empty([shape[int(axis)] for axis in order])
    back = turned.permute([order.index(str(axis)) for axis in range(len(order))])
    assert desc.strides == back.stride() == ordered_strides(shape, order)


def test_output_is_written_where_the_caller_says() -> None:
    room = torch.full((2, 3, 4, 5, 8), torch.nan)
    where = room[:, :, 1]
    assert attend(out=where) is where and torch.equal(where, attend())
    assert room[:, :, [0, 2, 3]].isnan().all()
    out, aux = attend(out=where, return_lse=True)
    assert out is where and aux.lse.shape == (2, 3, 5)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        (torch.empty(2, 3, 5, 4), "out needs .* as the output has it"),
        (torch.empty(2, 3, 5, 8, dtype=torch.float64), "out needs .* as the output has it"),
        (torch.empty(1, 3, 5, 8).expand(2, -1, -1, -1), "several positions in one place"),
        (torch.empty(300).as_strided((2, 3, 5, 8), (120, 40, 4, 1)), "several positions in one"),
        (torch.empty(2, 3, 5, 8, requires_grad=True), "has no gradient"),
        ([1], "out needs a tensor; got list"),
    ],
    ids=["shape", "dtype", "expanded", "rows in rows", "gradient", "list"],
)
def test_places_that_do_not_fit_are_refused(where: Any, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        attend(out=where)


def test_calls_with_gradients_write_nowhere() -> None:
    q = VIEW.clone().requires_grad_()
    where = torch.empty(2, 3, 5, 8)
    with pytest.raises(SpecError, match="under torch.no_grad"):
        attngen.attention(q, VIEW, VIEW, out=where, **HEADS)
    with torch.no_grad():
        assert torch.equal(attngen.attention(q, VIEW, VIEW, out=where, **HEADS), where)


def slices(*starts: int, step: int = 96, room: int = 1000) -> list[torch.Tensor]:
    """[b, s, h, d] of one buffer, whose rows of positions lie this far apart."""
    buffer = torch.randn(room, generator=GENERATOR)
    return [buffer.as_strided((2, 4, 3, 8), (4 * step, step, 8, 1), start) for start in starts]


@pytest.mark.parametrize(
    ("tensors", "named"),
    [(slices(0, 24, 48, 72), ""), (slices(0, 24, 48, 64), "v"), (slices(0, 24, 48, 8), "q")],
    ids=["between", "over the end", "over the beginning"],
)
def test_outputs_over_operands_are_refused_and_between_them_not(tensors: Any, named: str) -> None:
    *operands, where = tensors
    if named:
        with pytest.raises(SpecError, match=f"out lies where {named} does"):
            attngen.attention(*operands, out=where, backend="reference")
    else:
        wanted = attngen.attention(*operands, backend="reference")
        attngen.attention(*operands, out=where, backend="reference")
        assert torch.equal(where, wanted)


def test_tensors_without_memory_overlap_nothing() -> None:
    empty = [torch.empty(0, 4, 2, 8) for _ in range(4)]
    *operands, where = empty
    assert attngen.attention(*operands, out=where, backend="reference") is where


@pytest.mark.parametrize("seed", range(3))
def test_common_bytes_are_found_as_by_counting(seed: int) -> None:
    numbers = random.Random(seed)
    found = set()
    for _ in range(200):
        step = numbers.choice([4, 8])
        one, other = (
            TensorDesc(
                (2, numbers.randint(1, 3), numbers.randint(1, 3)),
                (numbers.choice([step, 4 * step]), step, 1),
                numbers.choice(["float16", "float32"]),
            )
            for _ in range(2)
        )
        at = numbers.randrange(0, 24, 2)
        apart = places(one, 0).isdisjoint(places(other, at))
        said = not share_bytes(one, 0, other, at)
        assert apart or not said  # a slice between others may be taken for one over them
        found.add((apart, said))
    assert {(True, True), (False, False)} <= found


def places(tensor: TensorDesc, at: int) -> set[int]:
    """Addresses of a tensor's bytes."""
    item = tensor.element_size()
    indices = itertools.product(*[range(n) for n in tensor.shape])
    starts = [sum(i * step for i, step in zip(x, tensor.strides, strict=True)) for x in indices]
    return {at + start * item + byte for start in starts for byte in range(item)}


def test_captured_numbers_that_learn_get_no_gradient_by_out() -> None:
    factor = torch.ones((), requires_grad=True)
    with pytest.raises(SpecError, match="under torch.no_grad"):
        attend(out=torch.empty(2, 3, 5, 8), score_mod=lambda s, b, h, i, j: s * factor)


class Writes:
    """A known call, whose kernels write where they are told."""

    def into(self, out: torch.Tensor, tensors: Any, schedule: Any) -> torch.Tensor:
        out.data.fill_(1)
        return out


def test_autograd_knows_of_outputs_that_kernels_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(into.calls, "find", lambda key, tensors: Writes())
    where = torch.zeros(2, 3, 5, 8, requires_grad=True).exp()
    total = where.sin().sum()
    with torch.no_grad():
        attend(out=where)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
