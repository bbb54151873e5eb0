"""Functions that spec files name: what stands for them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import attngen
from attngen import SpecError
from attngen.fragments import features
from attngen.fragments.program_text import parse_program
from attngen.spec import resolve
from tests.support.own_fragments import kept

PAGED = "paged_kv_bshd_bshd_bshd"
MODS = """
import torch

table = torch.empty(33, 1, device="meta", requires_grad=True)
slopes, pairs = torch.empty(7), torch.empty(7, 9, dtype=torch.bfloat16)
rows, keys = (torch.empty(7, device="meta") for _ in range(2))


def softcap(s, b, h, i, j):
    return 30 * torch.tanh(s / 30)


def alibi(s, b, h, i, j):
    return s - slopes[h] * (i - j).abs()


def relative():
    return lambda s, b, h, i, j: s + table[(j - i).clamp(-16, 16) + 16, h]


def added(s, b, h, i, j):
    return s + pairs[i, j]


def both(s, b, h, i, j):
    return s * rows[i] + keys[j]


def bent(s, b, h, i, j):
    return 12 * s / (12 + s.abs())


def sliding(b, h, i, j):
    return (i >= j) & (i - j < 128)


def causal(b, h, i, j):
    return i >= j


def odd(b, h, i, j):
    return (i - j) % 2 == 0


def draws(s, b, h, i, j):
    return s + torch.rand(())


number = 3
"""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    with kept():
        yield


@pytest.fixture
def spec_of(tmp_path: Path):
    """The spec of a file with such lines, beside a file of functions."""
    (tmp_path / "mods.py").write_text(MODS)

    def made(*lines: str) -> attngen.AttentionSpec:
        path = tmp_path / "some.toml"
        path.write_text("[[kernel]]\nhead_dim = 64\n" + "\n".join(lines))
        (found,) = attngen.load_specs(path)
        return found

    return made


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('score_mod = "python:mods.py:softcap"', {"softcap": True}),
        ('score_mod = "python:mods.py:alibi"', {"alibi": True}),
        ('mask_mod = "python:mods.py:sliding"', {"mask": "causal", "window": True}),
        ('mask_mod = "python:mods.py:causal"', {"mask": "causal"}),
        ('score_mod = "python:mods.py:added"', {"bias": "post_scale"}),
        (
            'mask_mod = "python:mods.py:odd"\nlayout = "thd"\nattn_mask = true',
            {"attn_mask": True, "layout": "thd"},
        ),
        (
            f'mask_mod = "python:mods.py:odd"\nlayout = "{PAGED}"\nattn_mask = true',
            {"attn_mask": True, "layout": PAGED},
        ),
    ],
)
def test_functions_stand_for_fields(spec_of, line, wanted) -> None:
    plain = "\n".join(
        f"{k} = {str(v).lower() if v is True else repr(v)}" for k, v in wanted.items()
    )
    assert spec_of(line) == spec_of(plain)


def test_other_scores_are_programs_and_learn_what_requires_gradients(spec_of) -> None:
    bent = spec_of('score_mod = "python:mods.py:bent"', 'mask_mod = "python:mods.py:causal"')
    assert bent.mask == "causal"
    (problem,) = resolve.resolve(bent, features.scan())
    assert [parse_program(text).name for text in problem.fragment_digests] == [bent.score_mod]
    learned = spec_of('score_mod = "python:mods.py:relative"').score_mod
    assert features.scan()["score"][learned].learned == (0,)


def test_tensors_without_values_are_told_apart(spec_of) -> None:
    both = spec_of('score_mod = "python:mods.py:both"').score_mod
    program = features.program_named(both)
    assert program is not None and len(program.captures) == 2


def test_other_masks_are_programs_that_kernels_of_their_own_make(spec_of) -> None:
    odd = spec_of('mask_mod = "python:mods.py:odd"', 'directions = ["fwd", "bwd"]')
    forward, backward, making = resolve.resolve(odd, features.scan())
    assert forward.listed and backward.listed and making.direction == "mask"
    (text,) = making.fragment_digests
    assert parse_program(text).name == odd.mask_mod == making.masks[0]
    with pytest.raises(SpecError, match="mask_mod 'traced_mask_' is unknown"):
        resolve.resolve(replace(odd, mask_mod="traced_mask_"), features.scan())
    for beside in ({"bias": "post_scale"}, {"layout": PAGED, "directions": ("fwd",)}):
        forward, *_ = resolve.resolve(replace(odd, **beside), features.scan())
        assert forward.made and not forward.listed
    with pytest.raises(SpecError, match="mask_mod=False"):
        split = replace(odd, decode=True, directions=("fwd",))
        resolve.resolve(split, features.scan())


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("mods.py:nothing", "mods.py has no nothing"),
        ("mods.py:number", "is no function, but int"),
        ("mods.py", "is no function: write python:FILE.py:NAME"),
        ("gone.py:softcap", "gone.py does not run: FileNotFoundError"),
        ("no.such.module:softcap", "no.such.module does not run: ModuleNotFoundError"),
        ("mods.py:draws", "score_mod draws random numbers at"),
        ("mods.py:causal", "score_mod"),
    ],
)
def test_refusals_name_the_line_and_the_reason(spec_of, word, reason) -> None:
    with pytest.raises(SpecError, match=f"line 3: kernel .*score_mod: .*{reason}"):
        spec_of(f'score_mod = "python:{word}"')


def test_masks_that_are_made_are_refused_beside_split_keys(spec_of) -> None:
    """Calls with one split no keys, so that no kernel of such a spec would serve any."""
    with pytest.raises(SpecError, match="mask_mod: .*splits keys.*leave decode out"):
        spec_of('mask_mod = "python:mods.py:odd"', "decode = true")
    sliding = spec_of('mask_mod = "python:mods.py:sliding"', "decode = true")
    assert sliding.decode and sliding.window and not sliding.attn_mask
