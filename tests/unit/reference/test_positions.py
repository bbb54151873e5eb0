"""Parts of longer sequences, by their positions, are parts of one call over the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attngen
from attngen import SpecError, merge_states, reference
from attngen.call.positions import LIMIT, Positions
from attngen.reference import dropout
from attngen.spec.attention_spec import AttentionSpec

Q, K, V = (torch.randn(1, 24, 2, 8, dtype=torch.float64) for _ in range(3))
STATE = torch.tensor((3, 4))


def attend(*operands: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, aux = reference.attention(*operands, **given, return_lse=True)
    assert aux.lse is not None
    return out, aux.lse


@pytest.mark.parametrize(
    "given",
    [
        {"mask": "causal", "alibi_slopes": True, "dropout_p": 0.3, "rng_state": STATE},
        {"window": (5, 3), "dropout_p": 0.5, "rng_state": STATE},
        {"mask": "causal_bottom_right", "alibi_slopes": True},
    ],
    ids=["causal", "window", "bottom_right"],
)
def test_parts_are_those_of_one_call(given: dict[str, Any]) -> None:
    """Queries from the seventh on, against keys cut at the twelfth."""
    whole = attend(Q[:, :20], K, V, **given)
    first, cut, aligned = 7, 11, 4 * given.get("mask", "").endswith("bottom_right")
    given["mask"] = given.get("mask", "none").removesuffix("_bottom_right")
    parts = [
        attend(Q[:, first:20], K[:, a:b], V[:, a:b], positions=(first, a, first + aligned - a),
               **given)
        for a, b in ((0, cut), (cut, 24))
    ]  # fmt: skip
    out, lse = merge_states(*zip(*parts, strict=True))
    assert torch.allclose(out, whole[0][:, first:], atol=1e-14)
    assert torch.allclose(lse, whole[1][..., first:], atol=1e-14)


def test_bytes_of_a_part_are_the_whole_s() -> None:
    whole = torch.stack([dropout.sequence_bytes(STATE, b, 4, 40, 50) for b in range(3)])
    part = dropout.sequence_bytes(STATE, 1, 2, 19, 23, Positions(21, 17, 0, head=2, sequence=1))
    assert torch.equal(part, whole[2, 2:, 21:, 17:40])


def test_positions_that_are_none_are_refused() -> None:
    for wrong in (3, (1,), (1, 2, 3, 4, 5, 6), (-1, 0), (0, LIMIT), (0.5, 1), (True, 0), "ab"):
        with pytest.raises(SpecError, match="positions needs"):
            reference.attention(Q, K, V, positions=wrong)
    reference.attention(Q, K, V, positions=[0, 5, -5])


def test_what_does_not_follow_positions_is_refused_beside_them() -> None:
    for more in (
        {"mask": "causal_bottom_right"},
        {"bottom_right": True},
        {"mask": "prefix", "prefix": 3},
        {"score_mod": lambda s, *_: s},
    ):
        with pytest.raises(SpecError, match="positions beside"):
            reference.attention(Q, K, V, positions=(1, 1), **more)


def test_spec_of_a_call_says_that_it_has_positions() -> None:
    q = Q.to(torch.bfloat16)
    assert AttentionSpec.from_call(q, q, q, positions=(4, 4)).positions
    assert not AttentionSpec.from_call(q, q, q).positions
    few = AttentionSpec.from_call(q[:, :1], q, q, positions=(4, 4))
    assert not few.decode  # which kernels that split keys do not know
    out = attngen.attention(q, q, q, positions=(4, 4), mask="causal", backend="reference")
    assert torch.equal(out, reference.attention(q, q, q, mask="causal")[0])


def of_each(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("packed", [True, False])
def test_each_sequence_stands_where_its_positions_say(packed: bool) -> None:
    """One call, as two calls of a sequence each."""
    q, k, v = (torch.randn(2, 6, 2, 8, dtype=torch.float64) for _ in range(3))
    state = torch.tensor([3, 4])
    given = {"mask": "causal", "alibi_slopes": True, "dropout_p": 0.4, "rng_state": state}
    places = [(16, 3, 9, 1, 5), (0, 40, 2, 1, 7)]
    query, key, diagonal, _, sequence = map(of_each, *places)
    whole = q, k, v
    more: dict[str, Any] = {"positions": (query, key, diagonal, 1, sequence)}
    if packed:
        whole = tuple(x.flatten(0, 1) for x in whole)
        ends = of_each(0, 6, 12)
        more |= {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    out = attngen.attention(*whole, **given, **more, backend="reference")
    parts = [
        attngen.attention(
            *(x[b : b + 1] for x in (q, k, v)), **given, positions=place, backend="reference"
        )
        for b, place in enumerate(places)
    ]
    torch.testing.assert_close(out.view_as(q), torch.cat(parts))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"positions": (of_each(1), 0)}, r"query needs an int, or int32 \[b=2\]; got"),
        ({"positions": (of_each(1, 2), 0, 0, of_each(1, 1))}, "head needs an int; got"),
        ({"positions": (torch.zeros(2), 0)}, "query needs an int"),
        ({"positions": (of_each(1, 2), 0, 0, 0, 0, 0)}, "two to 5 numbers; got 6"),
        ({"positions": (of_each(1, 2), -1)}, "key=-1 is not from 0"),
        ({"positions": (of_each(1, 2), 1 << 40)}, "key=1099511627776 is not from 0"),
        ({"positions": (of_each(1, 2), 0, -LIMIT - 1)}, "diagonal=-536870913 is not"),
        ({"positions": (of_each(1, 2), True)}, "key needs an int, or"),
        ({"positions": (of_each(1, -2), 0, 0)}, "of sequence 1: query=-2 is not from 0"),
        ({"positions": (of_each(1, 2).to("meta"), 0)}, "query needs q's device, cpu; got meta"),
        ({"places": of_each(0, 0, LIMIT, 0).expand(2, 4).contiguous()}, "0: diagonal=536870912"),
        ({"places": torch.zeros(2, 4).int(), "positions": (5, 7)}, "all of them but the head"),
        ({"places": torch.zeros(2, 3).int()}, r"int32 \[b=2, 4\]"),
        ({"places": torch.zeros(2, 4)}, r"contiguous int32"),
        ({"places": torch.zeros(2, 4).int(), "bottom_right": True}, "beside bottom_right"),
        ({"places": torch.zeros(2, 4).int(), "positions": (of_each(1, 2), 0)}, "beside places"),
    ],
    ids=str,
)
def test_positions_of_each_are_refused_where_they_are_none(given, reason) -> None:
    q = torch.zeros(2, 6, 2, 8)
    with pytest.raises(attngen.SpecError, match=reason):
        attngen.attention(q, q, q, **given, backend="reference")


def test_numbers_of_numpy_stand_beside_positions_of_each() -> None:
    q = torch.randn(2, 6, 2, 8)
    given: dict[str, Any] = {"mask": "causal", "backend": "reference"}
    found = attngen.attention(q, q, q, **given, positions=(of_each(1, 2), np.int64(1)))
    wanted = attngen.attention(q, q, q, **given, positions=(of_each(1, 2), 1))
    assert torch.equal(found, wanted)


def test_places_of_one_sequence_have_any_step() -> None:
    """From one sequence to the next, of which there is none."""
    q, places = torch.randn(1, 6, 2, 8), torch.zeros(1, 8).int()
    found = attngen.attention(q, q, q, places=places[:, :4], backend="reference")
    assert torch.equal(found, attngen.attention(q, q, q, backend="reference"))
