"""tools/doors_speed.py: rows of steps, and the table that is made of them."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config
from transformers import masking_utils

from attngen.errors import MeasureError
from tools import doors_peers, doors_speed, doors_table


def row(**ms: float) -> dict[str, Any]:
    timed = {
        who: SimpleNamespace(milliseconds=lambda calls, taken=taken: taken)
        for who, taken in ms.items()
    }
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(doors_speed.MAKERS, "train", lambda model, length: None)
    task = doors_speed.Task("llama-8b", ("train",), 4096)
    made = doors_speed.Row(None, task, "train")
    made.timed, made.missing = timed, {"cudnn": "refused"}
    monkeypatch.undo()
    return made.measured(3)


def test_row_holds_medians_beside_the_best_peer() -> None:
    found = row(attngen=2.0, flash=3.0, flex=5.0)
    assert found["ms"] == {"attngen": 2.0, "flash": 3.0, "flex": 5.0}
    assert (found["best_peer"], found["ratio"]) == ("flash", 1.5)
    assert row(flash=3.0)["ratio"] is None and row(attngen=3.0)["best_peer"] is None


def test_short_steps_have_a_process_each() -> None:
    options = Namespace(stacks=["llama-8b"], lengths=[4096, 16384], steps=["prefill", "decode"])
    found = [(each.steps, each.length) for each in doors_speed.tasks_of(options)]
    both = ("prefill", "decode")
    assert found == [(("prefill",), 4096), (("decode",), 4096), (both, 16384)]


def test_results_are_apart_by_what_most_tokens_are() -> None:
    wanted = torch.ones(2, 4, 8)
    assert doors_speed.off_by(wanted * 1.25, wanted) == pytest.approx(0.25)
    tipped = wanted.clone()
    tipped[0, 1] = 7.0
    assert doors_speed.off_by(tipped, wanted) == 0.0


@pytest.mark.parametrize("window", [None, 3])
def test_own_attention_gets_the_mask_of_transformers(window: int | None) -> None:
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    sizes = {"batch_size": 2, "q_length": 2, "kv_length": 9, "q_offset": torch.tensor(4)}
    given = {**sizes, "mask_function": function, "dtype": torch.bfloat16}
    found = doors_peers.own_mask(**given)
    assert torch.equal(found, masking_utils.eager_mask(**given))
    assert 0 < (found == 0).sum() < found.numel()


def test_flex_attention_keeps_where_queries_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(masking_utils, "flex_attention_mask", lambda **x: asked.append(x))
    place = torch.tensor(4)
    doors_peers.flex_mask(q_offset=place, q_length=1)
    doors_peers.flex_mask(q_offset=7)
    place += 1
    assert asked == [{"q_offset": torch.tensor(4), "q_length": 1}, {"q_offset": 7}]


@pytest.mark.parametrize("sorts", [False, True])
def test_pytorch_sorts_for_inductor_where_it_is_asked_to(sorts: bool) -> None:
    before = config.triton.persistent_reductions
    with doors_peers.compiled(time.monotonic() + 5, sorts):
        assert config.triton.persistent_reductions is not sorts
    assert config.triton.persistent_reductions is before


def test_what_compiles_for_long_is_ended() -> None:
    with pytest.raises(MeasureError, match="not compiled in time"):
        with doors_peers.ended(time.monotonic() + 0.05):
            time.sleep(20)
    with doors_peers.ended(time.monotonic() + 0.05):
        pass
    time.sleep(0.1)


def test_table_has_a_line_a_row_and_names_who_is_missing(tmp_path: Path) -> None:
    machine = {"chip": "A chip", "torch": "2", "driver": "1"}
    report = {
        **{"machine": machine, "date": "2026-11-30", "rounds": 3, "layers": 2, "sequences": 8},
        **{"versions": {"transformers": "5"}, "rows": [row(attngen=2.0, flash=3.0)]},
    }
    path = tmp_path / "doors.json"
    path.write_text(json.dumps(report))
    head, _, line, _, about = doors_table.markdown(path)
    assert head == "| stack | step | tokens | attngen | sdpa flash | sdpa cuDNN | to best peer |"
    assert line == "| llama-8b | train | 4096 | 2 | 3 | – | 1.50 |"
    assert "A chip" in about
    path.write_text("{}")
    with pytest.raises(MeasureError, match="doors_speed"):
        list(doors_table.markdown(path))
