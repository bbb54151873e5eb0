"""The programs in examples/ run on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import json
import runpy

import pytest
import torch

from attngen import AttentionSpec
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def load(name: str, monkeypatch):
    """The module of an example, on the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(monkeypatch):
    return load("02_train.py", monkeypatch)


@pytest.fixture
def generate(monkeypatch):
    return load("03_generate.py", monkeypatch)


def test_first_example_runs(capsys):
    runpy.run_path(str(EXAMPLES / "01_attention.py"))
    assert "out (2, 512, 8, 128)" in capsys.readouterr().out


@pytest.mark.slow
def test_training_learns_alike_on_both_backends_and_writes_what_it_saw(train, tmp_path):
    pytest.importorskip("matplotlib")
    report, plot = tmp_path / "training.json", tmp_path / "training.svg"
    assert train.main(["--steps", "4", "--json", str(report), "--plot", str(plot)]) == 0
    read = json.loads(report.read_text())
    kernels, reference = read["losses"]["kernels"], read["losses"]["reference"]
    assert len(kernels) == 4 and kernels[-1] < kernels[0]
    assert kernels == reference and read["backends"]["kernels"] == "reference"
    assert "</svg>" in plot.read_text()


def test_training_whose_losses_part_fails(train, monkeypatch):
    losses = iter([[5.0, 4.0], [5.0, 4.0 + 2 * train.TOLERANCE]])
    monkeypatch.setattr(train, "train", lambda *_: next(losses))
    assert train.main([]) == 1


@pytest.mark.slow
def test_generating_over_pages_gives_the_tokens_of_the_reference(generate, capsys):
    assert generate.main(["--tokens", "3"]) == 0
    assert capsys.readouterr().out.count("3 written, 3 as the reference") == 3


@pytest.mark.slow
@torch.no_grad()
def test_generating_in_any_chunks_gives_the_same_tokens(generate):
    """Sequences that end their prompts at different steps, one that has nothing left to do."""
    torch.manual_seed(1)
    model, prompts = generate.Model(), [generate.SHARED + text for text in (b"", b"a longer one")]
    first, *others = (generate.generate(model, prompts, 2, chunk) for chunk in (500, 7, 33))
    assert all(each == first for each in others)
    assert [len(text) for text in first] == [len(prompt) + 2 for prompt in prompts]


@pytest.mark.slow
def test_generating_a_wrong_token_fails(generate, monkeypatch):
    right = generate.generate

    def wrong(model, prompts, count):
        texts = right(model, prompts, count)
        texts[1][-1] = (texts[1][-1] + 1) % 256
        return texts

    monkeypatch.setattr(generate, "generate", wrong)
    assert generate.main(["--tokens", "1"]) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": True},
        {"mask": "padding"},
        {"dtype": "e4m3"},
        {"layout": "bhsd"},
        {"seqused": True},
    ],
)
def test_demo_says_what_it_does_not_check(fields, monkeypatch, capsys):
    demo = load("demo.py", monkeypatch)
    assert demo.is_plain(AttentionSpec(64, mask="causal", window=True, name="plain"))
    assert not demo.is_plain(AttentionSpec(64, **{"mask": "causal", "name": "more", **fields}))
    assert capsys.readouterr().out.startswith("more             left out")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["05_finetune_transformers.py", "06_serve_transformers.py"])
def test_models_of_transformers_are_tuned_and_served(name, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers", minversion="5")
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    example = load(name, monkeypatch)
    assert example.main([]) == 0
    said = capsys.readouterr().out
    assert ("100% of the tokens" if "serve" in name else "by the model's own attention") in said
