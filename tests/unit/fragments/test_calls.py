"""Fragments that calls name: on the reference, of one's own, in specs, keys and traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import attngen
from attngen import reference
from attngen.call.fragments import KNOWN, operands_of
from attngen.compiler import digest
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.errors import SpecError
from attngen.fragments import definition, features
from attngen.io.values import from_json, to_json
from attngen.kernels.plan import plan, plans
from attngen.runtime import tracing
from attngen.spec.attention_spec import AttentionSpec, parse_specs
from attngen.spec.problem import Problem
from attngen.spec.resolve import resolve
from attngen.spec.variants import find_faults
from tests.support.own_fragments import kept
from tests.support.paths import ROOT

OWN = """<#
axis = "mask"
name = "near_{name}"
doc = "Query i sees keys within reach of its diagonal."
struct = "Near{struct}Mask"
bounds = ["left", "right"]
steady = true
reference = "abs(j - i - delta) <= reach_{name}"

[[operand]]
name = "reach_{name}"
domain = "scalar"
dtype = "i32"
minimum = 0
doc = "Keys on either side."
#>
<% macro emit() %>
struct Near{struct}Mask {{
  int reach;
  ATTNGEN_HD Range row_range(const Context& ctx, int i) const {{
    return {{i + ctx.delta - reach, i + ctx.delta + reach + 1}};
  }}
  ATTNGEN_HD Range col_range(const Context& ctx, int j) const {{
    return {{j - ctx.delta - reach, j - ctx.delta + reach + 1}};
  }}
}};
<% endmacro %>
"""
SCORE = """<#
name = "warm_{name}"
doc = "Divides every score by the temperature of its query head."
struct = "Warm{struct}Score"
reference = "score * coolness_{name}"

[[operand]]
name = "coolness_{name}"
domain = "head"
dtype = "f32"
doc = "1 / temperature."
#>
<% macro emit() %>
struct Warm{struct}Score {{
  float coolness;
  template <class At>
  ATTNGEN_HD float apply(const Context&, float score, At) const {{ return score * coolness; }}
  template <class At>
  ATTNGEN_HD float grad(const Context&, float, float, At) const {{ return coolness; }}
}};
<% endmacro %>
"""


@pytest.fixture(autouse=True)
def known_fragments():
    """Fragments that a test registers are gone after it."""
    with kept():
        yield


def write(folder: Path, text: str, stem: str, name: str) -> Path:
    """A fragment of one's own in a folder; name: of its own, since a process keeps all."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{stem}_{name}.cuh.j2"
    path.write_text(text.format(name=name, struct=name.capitalize()))
    return path


def attend(seen: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Attention of one head of one sequence under booleans [s_q, s_kv]."""
    scores = (q[0, :, 0] @ q[0, :, 0].T / q.shape[-1] ** 0.5).where(seen, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ q[0, :, 0]


def shown(rule, length: int) -> torch.Tensor:
    return torch.tensor([[rule(i, j) for j in range(length)] for i in range(length)])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"mask": "chunked", "chunked": 3}, lambda i, j: i // 3 == j // 3),
        ({"mask": ["chunked", "causal"], "chunked": 4}, lambda i, j: i // 4 == j // 4 and j <= i),
        ({"mask": "prefix", "prefix": 4}, lambda i, j: j < 4 or j <= i),
        ({"mask": "prefix", "prefix": np.int64(0)}, lambda i, j: j <= i),
        (
            {"mask": ("causal", "chunked"), "chunked": 6, "window": (1, 0)},
            lambda i, j: i // 6 == j // 6 and i - 1 <= j <= i,
        ),
    ],
)
def test_reference_masks_of_fragments_are_as_defined(arguments, rule) -> None:
    q = torch.randn(1, 10, 1, 8, dtype=torch.float64)
    out = attngen.attention(q, q, q, **arguments)
    torch.testing.assert_close(out[0, :, 0], attend(shown(rule, 10), q))


def test_reference_prefix_of_each_sequence_is_its_own_and_follows_lengths() -> None:
    q = torch.randn(2, 6, 1, 8, dtype=torch.float64)
    prefix = torch.tensor([1, 5], dtype=torch.int32)
    out = attngen.attention(q, q, q, mask="prefix", prefix=prefix)
    for b in range(2):
        one = attngen.attention(q[b : b + 1], q[b : b + 1], q[b : b + 1], mask="prefix",
                                prefix=int(prefix[b]))  # fmt: skip
        torch.testing.assert_close(out[b : b + 1], one)
    used = torch.tensor([4, 6], dtype=torch.int32)
    padded = attngen.attention(
        q, q, q, mask=["padding", "prefix"], prefix=prefix, seqused_q=used, seqused_kv=used
    )
    first = q[:1, :4]
    alone = attngen.attention(first, first, first, mask="prefix", prefix=1)
    torch.testing.assert_close(padded[:1, :4], alone)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mask": "chunked"}, "mask 'chunked' needs chunked: Positions of a chunk. Pass an int"),
        ({"mask": "chunked", "chunked": 0}, "chunked needs an int >= 1; got 0"),
        ({"mask": "chunked", "chunked": True}, "chunked needs an int >= 1; got True"),
        ({"mask": "chunked", "chunked": 1 << 31}, "chunked needs an int >= 1"),
        ({"mask": "chunked", "chunked": torch.tensor(4)}, "got int64"),
        ({"mask": "causal", "chunked": 4}, "chunked belongs to mask='chunked'"),
        ({"mask": "prefix", "prefix": 2.5}, "prefix needs an int or int32 .b=1.; got 2.5"),
        ({"mask": "prefix", "prefix": torch.zeros(2).int()}, "got int32 .2."),
        ({"mask": ["prefix", "causal"], "prefix": 2}, "'prefix' is used alone"),
        ({"mask": "causal+chunkd"}, "mask='causal.chunkd' is not a mask. Use one of none, causal"),
        ({"mask": torch.ones(4, 4) > 0}, "mask needs a name; got bool .4, 4.. Pass .* attn_mask"),
        ({"score_mod": "bend"}, "score_mod 'bend' is unknown.* pass a function"),
    ],
)
@pytest.mark.parametrize("attention", [attngen.attention, reference.attention])
def test_call_wrong_arguments_of_fragments_are_refused_with_what_is_wanted(
    attention, arguments, reason
) -> None:
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(SpecError, match=reason):
        attention(q, q, q, **arguments)


@pytest.mark.parametrize("attention", [attngen.attention, reference.attention])
def test_call_argument_that_no_fragment_has_is_an_error_of_python(attention) -> None:
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(TypeError, match="argument 'chunkd'; did you mean 'chunked'"):
        attention(q, q, q, mask="chunked", chunkd=4)


def test_registered_fragments_are_called_listed_and_resolved(tmp_path: Path) -> None:
    mask = write(tmp_path, OWN, "near", "a")
    score = write(tmp_path / "score", SCORE, "warm", "a")
    assert attngen.register_fragment(mask).name == "near_a"
    assert attngen.register_fragment(score).digest == attngen.register_fragment(score).digest
    q = torch.randn(1, 10, 2, 8, dtype=torch.float64, requires_grad=True)
    coolness = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    out = attngen.attention(
        q, q, q, mask="near_a", reach_a=2, score_mod="warm_a", coolness_a=coolness
    )
    seen = shown(lambda i, j: abs(i - j) <= 2, 10)
    scores = torch.einsum("bihd,bjhd->bhij", q, q) / 8**0.5 * coolness[:, None, None]
    wanted = torch.einsum("bhij,bjhd->bihd", scores.where(seen, -torch.inf).softmax(-1), q)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (q, coolness)),
        torch.autograd.grad(wanted.sum(), (q, coolness)),
    )
    spec = AttentionSpec(head_dim=64, mask="causal+near_a", score_mod="warm_a")
    (problem,) = resolve(spec, features.scan())
    assert (problem.masks, problem.scores) == (("causal", "near_a"), ("warm_a",))
    digests = (KNOWN["mask"]["near_a"].digest, KNOWN["score"]["warm_a"].digest)
    assert problem.fragment_digests == digests
    assert from_json(Problem, to_json(problem)) == problem
    assert find_faults(problem, "sm_90a", features.scan()) == []
    (fault,) = find_faults(replace(problem, fragment_digests=("0", "1")), "sm_90a", features.scan())
    assert "fragment_digests" in fault


def test_registered_fragment_of_another_text_or_of_attngens_name_is_refused(tmp_path) -> None:
    path = write(tmp_path, OWN, "near", "b")
    attngen.register_fragment(path)
    path.write_text(path.read_text().replace("<= reach_b", "< reach_b"))
    with pytest.raises(SpecError, match="of a file, has the name 'near_b' already"):
        attngen.register_fragment(path)
    other = path.with_name("near_c.cuh.j2")
    other.write_text(path.read_text().replace("near_b", "near_c"))
    with pytest.raises(SpecError, match="has the struct 'NearBMask' already"):
        attngen.register_fragment(other)
    shipped = tmp_path / "causal.cuh.j2"
    shipped.write_text(path.read_text().replace("near_b", "causal"))
    with pytest.raises(SpecError, match="of attngen, has the name 'causal' already"):
        attngen.register_fragment(shipped)
    with pytest.raises(SpecError, match="No such file"):
        attngen.register_fragment(tmp_path / "gone.cuh.j2")
    softmax = tmp_path / "near_d.cuh.j2"
    softmax.write_text(path.read_text().replace('axis = "mask"', 'axis = "softmax"'))
    with pytest.raises(SpecError, match="axis = 'softmax', needs 'mask' or 'score'"):
        attngen.register_fragment(softmax)


LIST = """
import sys
from attngen.call.fragments import KNOWN
from attngen.compiler import digest
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.kernels.plan import plan, plans
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import resolve
for mask in sys.argv[1:]:
    (problem,) = resolve(AttentionSpec(head_dim=64, mask=mask), KNOWN)
    print(digest.cache_key(problem, plan(problem, "sm_90a"), "sm_90a").digest)
"""


def keys_in(folder: Path | None, *masks: str) -> list[str]:
    """Keys of forwards under these masks in a process with a folder of fragments."""
    found = {} if folder is None else {"ATTNGEN_FRAGMENTS": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", LIST, *masks], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, **found},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_environment_names_folders_of_fragments_that_leave_other_keys_as_they_are(tmp_path) -> None:
    write(tmp_path / "mask", OWN, "near", "e")
    bare = keys_in(None, "causal", "chunked")
    *same, own = keys_in(tmp_path, "causal", "chunked", "near_e")
    assert same == bare
    path = tmp_path / "mask" / "near_e.cuh.j2"
    path.write_text(path.read_text() + "\n")
    assert keys_in(tmp_path, "near_e") != [own]
    path.write_text(path.read_text().replace("reach_e", "nonsense", 1))
    with pytest.raises(AssertionError, match="near_e.cuh.j2: reference knows no"):
        keys_in(tmp_path, "causal")


def test_fragment_without_a_definition_is_refused_by_the_reference_where_values_count(
    tmp_path,
) -> None:
    path = write(tmp_path, OWN, "near", "f")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("reference")))
    attngen.register_fragment(path)
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(SpecError, match="mask 'near_f' has no definition for the reference"):
        attngen.attention(q, q, q, mask="near_f", reach_f=2)
    meta = q.to("meta")
    assert attngen.attention(meta, meta, meta, mask="near_f", reach_f=2).shape == q.shape


def test_spec_files_name_masks_that_intersect_and_products_of_them() -> None:
    table = {"head_dim": 64, "mask": ["causal+chunked", "prefix"], "name": "x"}
    specs = parse_specs({"kernel": [table]}, "specs.toml")
    assert [spec.mask for spec in specs] == ["causal+chunked", "prefix"]
    assert [spec.name for spec in specs] == ["x-causal+chunked", "x-prefix"]
    found = [resolve(spec, KNOWN)[0].label for spec in specs]
    assert found == ["causal_chunked_d64_bf16", "prefix_d64_bf16"]


def test_spec_of_a_call_has_the_masks_and_scores_that_it_names() -> None:
    q = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    spec = AttentionSpec.from_call(q, q, q, mask=["chunked", "causal"], chunked=8)
    assert spec.mask == "causal+chunked" and not spec.score_mod
    with pytest.raises(SpecError, match="attention has no argument 'chunkd'"):
        AttentionSpec.from_call(q, q, q, mask="chunked", chunkd=8)


def test_traces_from_before_fragments_had_digests_are_read(tmp_path: Path) -> None:
    (problem,) = resolve(AttentionSpec(head_dim=64, mask="causal"), KNOWN)
    data = json.loads(to_json(problem))
    del data["fragment_digests"]
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"arch": "sm_90a", "problem": data}) + "\n")
    (variant,) = tracing.read(path)
    assert variant == (problem, "sm_90a")
    assert digest.cache_key(problem, plan(problem, "sm_90a"), "sm_90a")


def test_operands_have_places_that_depend_on_the_fragments_alone() -> None:
    (chunked,) = operands_of("causal+chunked", None)
    (prefix,) = operands_of("prefix", None)
    assert (chunked.slot, chunked.number, chunked.parameter) == ("", 0, "arg_chunked")
    assert (prefix.slot, prefix.number, prefix.shapes) == ("fragment_0", 0, (("b",),))
    assert operands_of("none", None) == () and operands_of(5, None) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("j <= i and j > 0", "joins conditions of tensors by &"),
        ("0 <= j <= i", "compares two values at a time"),
        ("__import__('os')", "calls none but"),
        ("j.__class__", "has a Attribute"),
        ("(lambda: j)()", "calls none but"),
        ("where(j < i, 'a', 1)", "is no number"),
        ("q_seq + j", "knows no 'q_seq'"),
        ("clamp(j, min=0)", "passes arguments by their place"),
        ("[j for j in i]", "has a ListComp"),
        ("j <", "is no expression"),
        ("j" * 3000, "at most 2000 characters"),
        (7, "is an expression"),
    ],
)
def test_definition_reaches_nothing_but_its_names(text, reason) -> None:
    assert any(reason in mistake for mistake in definition.mistakes_of(text, ("i", "j")))
    assert definition.mistakes_of("(j <= i) & ~(where(j < 3, i, j) == 1.5)", ("i", "j")) == []


def attend_chunks(q: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
    chunks = attngen.attention(q, q, q, mask=["causal", "chunked"], chunked=4)
    return chunks + attngen.attention(q, q, q, mask="prefix", prefix=prefix)


@pytest.mark.slow
def test_traces_transforms_and_gradients_follow_fragments() -> None:
    q = torch.randn(2, 10, 1, 8, dtype=torch.float64)
    prefix = torch.tensor([2, 7], dtype=torch.int32)
    wanted = attend_chunks(q, prefix)
    torch.testing.assert_close(torch.compile(attend_chunks, backend="eager")(q, prefix), wanted)
    found = torch.vmap(lambda x, n: attend_chunks(x[None], n[None])[0])(q, prefix)
    torch.testing.assert_close(found, wanted)
    (pulled,) = torch.func.vjp(lambda x: attend_chunks(x, prefix), q)[1](wanted)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(attend_chunks(leaf, prefix), leaf, wanted)
    torch.testing.assert_close(pulled, expected)
    compiled = torch.compile(
        lambda x, n: attngen.attention(x, x, x, mask="prefix", prefix=n), backend="eager"
    )
    for n in (3, 4, 5):  # a symbol from the second on
        one = attngen.attention(q, q, q, mask="prefix", prefix=n)
        torch.testing.assert_close(compiled(q, n), one)
    graph = torch.export.export(Attends(), (q, prefix)).module()
    torch.testing.assert_close(graph(q, prefix), wanted)


class Attends(torch.nn.Module):
    def forward(self, q: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        return attend_chunks(q, prefix)


def test_nested_tensors_pass_arguments_of_fragments_on() -> None:
    parts = [torch.randn(n, 1, 8) for n in (5, 9)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged)
    out = attngen.attention(q, q, q, layout="thd", mask="chunked", chunked=3)
    for found, part in zip(out.unbind(), parts, strict=True):
        one = attngen.attention(part[None], part[None], part[None], mask="chunked", chunked=3)
        torch.testing.assert_close(found, one[0])


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["chunked", "causal+chunked", "prefix"])
def test_kernels_of_attngens_own_masks_compile_without_spills(mask: str) -> None:
    spec = AttentionSpec(head_dim=128, mask=mask, layout="thd", directions=("fwd", "bwd"))
    for problem in resolve(spec, KNOWN):
        for each in plans(problem, "sm_90a"):
            binary, _ = compile_source(render_problem(problem, each), problem, "sm_90a")
            assert binary.resources.in_local_memory == ""
