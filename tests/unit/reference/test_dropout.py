"""The dropout mask: frozen bits, the published Philox vectors, statistics, independence."""

import itertools
import json

import pytest
import torch

from attngen.call.dropout import drop_threshold, keep_scale
from attngen.reference import attention, dropout_keep_mask
from attngen.reference.dropout import philox_4x32_10, sequence_bytes
from tests.support.paths import ROOT

FROZEN = json.loads((ROOT / "tests/support/data" / "dropout_bits.json").read_text())
STATES = [(0, 0), (1, 2), (-1, -(2**63)), (2**63 - 1, 0x0123456789ABCDEF)]


def philox(counter, key):
    """Philox-4x32-10 in Python's own integers, from the paper, independent of the reference."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def random_byte(seed, offset, b, h, i, j):
    """The byte that decides element (i, j), spelled out from the definition."""
    seed, offset = seed % 2**64, offset % 2**64
    key = philox((b, h, offset % 2**32, offset >> 32), (seed % 2**32, seed >> 32))[:2]
    row, col = (4 * (n // 16) + (n // 2) % 4 for n in (i, j))
    word = philox((row, col, 0, 0), key)[i % 2 + 2 * (j % 2)]
    return word.to_bytes(4, "little")[(i // 8) % 2 + 2 * ((j // 8) % 2)]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers_of_random123_are_met(counter, key, expected):
    want = [int(word, 16) for word in expected.split()]
    as_tensors = [tuple(torch.tensor(n) for n in numbers) for numbers in (counter, key)]
    assert [int(word) for word in philox_4x32_10(*as_tensors)] == want
    assert philox(counter, key) == want


def test_philox_random_inputs_equal_python_integers():
    make = torch.Generator().manual_seed(3)
    inputs = torch.randint(0, 2**32, (6, 200), generator=make)
    got = torch.stack(philox_4x32_10(tuple(inputs[:4]), tuple(inputs[4:])), dim=1)
    assert got.tolist() == [philox(column[:4], column[4:]) for column in inputs.T.tolist()]


@pytest.mark.parametrize("state", STATES)
def test_bytes_every_element_follow_the_definition(state):
    rng_state = torch.tensor(state)
    for b in (0, 3):
        got = sequence_bytes(rng_state, b, 2, 19, 35)
        assert got.shape == (2, 19, 35)
        for h, i, j in itertools.product(range(2), range(0, 19, 3), range(35)):
            assert got[h, i, j] == random_byte(*state, b, h, i, j), (h, i, j)


@pytest.mark.parametrize("case", FROZEN["cases"], ids=lambda c: f"seed{c['seed']}_b{c['b']}")
def test_bytes_frozen_vectors_are_unchanged(case):
    rows = [list(bytes.fromhex(row)) for row in case["rows"]]
    rng_state = torch.tensor([case["seed"], case["offset"]])
    got = sequence_bytes(rng_state, case["b"], case["h"] + 1, len(rows), len(rows[0]))
    assert got[case["h"]].tolist() == rows


@pytest.mark.parametrize("case", FROZEN["masks"], ids=lambda c: f"p{c['p']}")
def test_keep_mask_frozen_vectors_are_unchanged(case):
    keep = dropout_keep_mask(torch.tensor([7, 9]), case["p"], 1, 1, len(case["rows"]), 16)
    assert ["".join("01"[bit] for bit in row) for row in keep[0, 0].tolist()] == case["rows"]


def test_bytes_one_call_serves_its_sixteen_elements():
    seed, offset, b, h = 5, 6, 1, 0
    got = sequence_bytes(torch.tensor([seed, offset]), b, 1, 64, 64)[h]
    key = philox((b, h, offset, 0), (seed, 0))[:2]
    for i, j in [(0, 0), (6, 2), (16, 36), (52, 20)]:
        served = got[[i, i + 1, i + 8, i + 9]][:, [j, j + 1, j + 8, j + 9]]
        row, col = (4 * (n // 16) + (n % 16) // 2 for n in (i, j))
        words = philox((row, col, 0, 0), key)
        assert sorted(served.flatten().tolist()) == sorted(
            byte for word in words for byte in word.to_bytes(4, "little")
        )


@pytest.mark.parametrize(
    ("p", "threshold", "scale"),
    [
        (0.0, 0, 1.0),
        (1e-9, 1, 256 / 255),
        (0.1, 26, 256 / 230),
        (0.5, 128, 2.0),
        (2.5 / 256, 2, 256 / 254),
        (3.5 / 256, 4, 256 / 252),
        (0.9999, 255, 256.0),
        (1.0, 256, 0.0),
    ],
)
def test_threshold_probability_is_rounded_but_never_to_zero_or_one(p, threshold, scale):
    assert drop_threshold(p) == threshold
    assert keep_scale(p) == scale


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_mask_frequency_matches_rounded_probability(p):
    keep = dropout_keep_mask(torch.tensor([123, 456]), p, 2, 3, 256, 256).double()
    expected = 1 - drop_threshold(p) / 256
    n = keep.numel()
    # Five standard deviations of a binomial count; the state is fixed, so this cannot flicker.
    bound = 5 * (expected * (1 - expected) / n) ** 0.5
    assert abs(keep.mean().item() - expected) < bound
    for axis in range(4):
        others = [other for other in range(4) if other != axis]
        means = keep.mean(dim=others)
        spread = 5 * (expected * (1 - expected) * means.numel() / n) ** 0.5
        assert ((means - expected).abs() < spread).all()


def test_keep_mask_neighbours_are_uncorrelated():
    keep = dropout_keep_mask(torch.tensor([5, 5]), 0.5, 2, 2, 128, 128).double() - 0.5
    shifts = [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 8, 0), (0, 0, 0, 8), (0, 1, 0, 0), (1, 0, 0, 0)]
    for shift in [*shifts, (0, 0, 16, 0), (0, 0, 1, 1)]:
        moved = keep.roll(shift, dims=(0, 1, 2, 3))
        # Each product is ±1/4, independent unless the generator is broken.
        assert abs((keep * moved).mean().item()) < 5 * 0.25 / keep.numel() ** 0.5, shift


def test_keep_mask_any_input_changes_it():
    def mask(seed=1, offset=2, b=0, h=0):
        state = torch.tensor([seed, offset])
        return dropout_keep_mask(state, 0.5, b + 1, h + 1, 32, 32)[b, h]

    variants = [mask(), mask(seed=2), mask(seed=1 + 2**32), mask(offset=3)]
    variants += [mask(offset=2 + 2**32), mask(b=1), mask(h=1)]
    for one, other in itertools.combinations(variants, 2):
        assert not torch.equal(one, other)


def test_keep_mask_transposed_roles_stay_distinct():
    keep = dropout_keep_mask(torch.tensor([1, 2]), 0.5, 1, 1, 64, 64)[0, 0]
    assert not torch.equal(keep, keep.T)


def test_keep_mask_smaller_sizes_are_a_corner_of_larger_ones():
    state = torch.tensor([77, 88])
    large = dropout_keep_mask(state, 0.4, 3, 4, 50, 70)
    for b, h, i, j in [(1, 1, 1, 1), (2, 3, 17, 33), (3, 4, 50, 69), (0, 2, 0, 5)]:
        assert torch.equal(dropout_keep_mask(state, 0.4, b, h, i, j), large[:b, :h, :i, :j])


@pytest.mark.parametrize(("p", "kept"), [(0.0, True), (1.0, False)])
def test_keep_mask_certain_probability_keeps_all_or_nothing(p, kept):
    assert (dropout_keep_mask(torch.tensor([1, 2]), p, 1, 2, 64, 64) == kept).all()


def test_attention_dropout_multiplies_normalised_probabilities_by_the_mask():
    q, k = torch.randn(2, 2, 3, 21, 4, dtype=torch.float64)
    v = torch.eye(21, dtype=torch.float64).expand(2, 3, 21, 21)  # O is P itself.
    state = torch.tensor([3, 4])
    dropped, aux = attention(q, k, v, layout="bhsd", dropout_p=0.25, rng_state=state)
    plain, plain_aux = attention(q, k, v, layout="bhsd")
    keep = dropout_keep_mask(state, 0.25, 2, 3, 21, 21)
    torch.testing.assert_close(dropped, plain * keep / 0.75)
    assert torch.equal(aux.lse, plain_aux.lse)
    assert aux.rng_state is state


def test_attention_everything_dropped_gives_zero_and_zero_gradients():
    q, k, v = (torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(3))
    out, aux = attention(q, k, v, dropout_p=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert aux.lse.isfinite().all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_attention_without_state_draws_one_that_reproduces_the_output():
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    torch.manual_seed(1)
    first, first_aux = attention(q, k, v, dropout_p=0.5)
    second, second_aux = attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    again, _ = attention(q, k, v, dropout_p=0.5)
    replayed, _ = attention(q, k, v, dropout_p=0.5, rng_state=second_aux.rng_state)
    assert first_aux.rng_state.dtype == torch.int64
    assert torch.equal(first, again)
    assert torch.equal(second, replayed)
    assert not torch.equal(first, second)


def test_attention_dropout_is_the_same_in_every_layout():
    b, s, h = 2, 13, 3
    q, k, v = torch.randn(3, b, s, h, 4, dtype=torch.float64)
    options = {"dropout_p": 0.5, "rng_state": torch.tensor([8, 9])}
    want, _ = attention(q, k, v, **options)
    sbhd, _ = attention(*(x.transpose(0, 1) for x in (q, k, v)), layout="sbhd", **options)
    bhsd, _ = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", **options)
    cu = torch.tensor([0, s, 2 * s], dtype=torch.int32)
    thd, _ = attention(
        *(x.flatten(0, 1) for x in (q, k, v)),
        layout="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        **options,
    )
    torch.testing.assert_close(sbhd.transpose(0, 1), want)
    torch.testing.assert_close(bhsd.transpose(1, 2), want)
    torch.testing.assert_close(thd.unflatten(0, (b, s)), want)


def test_attention_mask_of_a_packed_sequence_is_that_of_its_index():
    n, state = 12, torch.tensor([1, 2])
    q, k = torch.zeros(2, 2 * n, 1, 4)
    v = torch.eye(n).repeat(2, 1).unsqueeze(1)  # O is P itself.
    cu = torch.tensor([0, n, 2 * n], dtype=torch.int32)
    out, _ = attention(
        q, k, v, layout="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, dropout_p=0.5, rng_state=state
    )
    kept = out.view(2, n, n) != 0
    assert torch.equal(kept, dropout_keep_mask(state, 0.5, 2, 1, n, n)[:, 0])


def test_probability_may_be_a_tensor():
    assert drop_threshold(torch.tensor(0.3)) == drop_threshold(0.3) == 77
