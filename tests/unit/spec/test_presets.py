"""`attngen specs`: what models need, whether kernels for it exist or not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from attngen.errors import SpecError
from attngen.fragments import features
from attngen.spec import presets, resolve
from attngen.spec.attention_spec import load_specs
from tests.support.cli_kit import run


def test_specs_without_name_lists_every_model() -> None:
    lines = run("specs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == presets.names()
    models = ("llama3", "qwen3", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "mistral")
    assert all(any(name.startswith(model) for name in presets.names()) for model in models)


def test_specs_of_all_models_make_one_spec_file(tmp_path: Path) -> None:
    result = run("specs", *presets.names(), "-o", tmp_path / "all.toml")
    assert result.exit_code == 0 and result.stdout == ""
    together = load_specs(tmp_path / "all.toml")
    alone = []
    for name in presets.names():
        (tmp_path / "one.toml").write_text(run("specs", name).stdout)
        alone += load_specs(tmp_path / "one.toml")
    assert list(together) == alone and len(alone) > len(presets.names())


def test_specs_replace_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("an important one\n")
    result = run("specs", "llama3", "-o", tmp_path / "mine.toml")
    assert result.exit_code == 1 and f"{tmp_path / 'mine.toml'} is there" in result.stderr
    assert (tmp_path / "mine.toml").read_text() == "an important one\n"


@pytest.mark.parametrize("name", presets.names())
def test_specs_each_names_its_source_and_is_built_or_refused_by_field(name: str) -> None:
    text = presets.text([name])
    assert re.search(r"^# Source: https://huggingface\.co/\S+/config\.json", text, re.MULTILINE)
    for spec in load_specs(presets.FOLDER / f"{name}.toml"):
        fields = {field.name for field in dataclasses.fields(spec)}
        for violation in resolve.find_violations(spec, features.scan()):
            assert violation.field in fields and violation.field in violation.reason


def test_specs_say_what_models_have() -> None:
    """Sinks, softcaps, windows and head dims are in the presets whether kernels exist or not."""

    def of(name: str) -> list[object]:
        every = load_specs(presets.FOLDER / f"{name}.toml")
        specs = [s for s in every if not s.decode and "paged" not in s.layout]
        return [(s.head_dim, s.head_dim_v, s.window, s.softcap, s.softmax) for s in specs]

    plain = "vanilla"
    assert of("llama3-8b") == [(128, None, False, False, plain)]
    assert of("gemma2-9b") == [(256, None, w, True, plain) for w in (True, False)]
    assert of("gemma3-27b") == [(128, None, w, False, plain) for w in (True, False)]
    assert of("gpt-oss-20b") == [(64, None, w, False, "learnable") for w in (True, False)]
    assert of("deepseek-v3") == [(192, 128, False, False, plain)]
    absorbed = load_specs(presets.FOLDER / "deepseek-v3.toml")[1:]
    assert all((s.head_dim, s.head_dim_v, s.decode) == (576, 512, True) for s in absorbed)


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2-9b", "gemma2-27b", "gemma3-27b", "gemma3-4b", "gpt-oss-20b", "llama3-8b"),
        *("mistral-7b", "qwen3-8b"),
    ],
)
def test_specs_have_what_a_server_calls_beside_each_prompt(name: str) -> None:
    """One query, dense and over pages, with the masks and head dims of the prompt, and the prompt
    over pages."""
    specs = load_specs(presets.FOLDER / f"{name}.toml")
    prompts = [s for s in specs if not s.decode and "paged" not in s.layout]
    for prompt in prompts:
        wanted = {
            dataclasses.replace(prompt, name=f"{prompt.name}-decode", decode=True),
            *(
                dataclasses.replace(
                    prompt,
                    name=f"{prompt.name}-paged{'-decode' * decode}",
                    layout="paged_kv_bshd_bshd_bshd",
                    decode=decode,
                )
                for decode in (False, True)
            ),
        }
        assert wanted <= {*specs}
    assert prompts and len(specs) == 4 * len(prompts)


def test_specs_family_means_all_its_models_and_none_twice() -> None:
    text = run("specs", "gemma3", "gemma3-4b").stdout
    assert text == presets.text(["gemma3-27b", "gemma3-4b"])


def test_specs_unknown_name_lists_what_there_is() -> None:
    result = run("specs", "gpt-9", "llama3-8b")
    assert result.exit_code == 1 and "'gpt-9'" in result.stderr and "llama3-8b" in result.stderr
    with pytest.raises(SpecError):
        presets.text(["../../pyproject"])
