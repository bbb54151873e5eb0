"""Launch programs that no attngen wrote: refused, with all reasons, before anything is packed."""

from __future__ import annotations

import copy
import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.compiler import batch
from attngen.compiler.builder import render_problem
from attngen.errors import BundleError, LaunchError
from attngen.io.values import from_data, to_data
from attngen.runtime import launch, load
from attngen.runtime.program import FIELD_BYTES, Binary, KernelEntry, Resources
from attngen.runtime.program_check import mistakes_of
from attngen.ship.bundle import Bundle
from attngen.spec.attention_spec import AttentionSpec, load_placed
from tests.support.bundle_kit import cubin_for, edit_manifest, make_program, write
from tests.support.cache_kit import ROOT, make_binary

SPECS = [
    AttentionSpec(head_dim=64, mask="causal", window=True, directions=("fwd", "bwd")),
    AttentionSpec(head_dim=128, dtype="e4m3"),
]


def described(specs: list[AttentionSpec]) -> list[Binary]:
    """The launch programs of the specs' kernels, which nothing has compiled."""
    jobs, refused = batch.jobs_of(specs, None)
    assert not refused
    return [
        dataclasses.replace(
            make_binary(),
            problem=job.problem,
            kernel=render_problem(job.problem, job.plan).kernel,
        )
        for job in jobs
    ]


BINARIES = described(SPECS)
FORWARD = next(each for each in BINARIES if each.kernel.tensor_maps)


@pytest.mark.timeout(300)
def test_every_kernel_of_the_example_specs_passes() -> None:
    placed = load_placed(sorted((ROOT / "examples" / "specs").glob("*.toml")))
    specs = [each.spec for each in placed]
    found = {each.kernel.entry: mistakes_of(each) for each in described(specs)}
    assert len(found) > 40 and not any(found.values()), found


def with_kernel(**changes: object) -> Binary:
    return dataclasses.replace(FORWARD, kernel=dataclasses.replace(FORWARD.kernel, **changes))  # type: ignore[arg-type]


def with_field(index: int, **changes: object) -> Binary:
    fields = list(FORWARD.kernel.fields)
    fields[index] = dataclasses.replace(fields[index], **changes)  # type: ignore[arg-type]
    return with_kernel(fields=tuple(fields))


def with_map(**changes: object) -> Binary:
    first, *rest = FORWARD.kernel.tensor_maps
    return with_kernel(tensor_maps=(dataclasses.replace(first, **changes), *rest))  # type: ignore[arg-type]


FIELDS, LAST = FORWARD.kernel.fields, len(FORWARD.kernel.fields) - 1
CRAFTED: dict[str, tuple[Binary, str]] = {
    "schema": (dataclasses.replace(FORWARD, schema=2), "schema 2"),
    "architecture": (dataclasses.replace(FORWARD, arch="../x"), "no architecture"),
    "head dim 0": (
        dataclasses.replace(FORWARD, problem=dataclasses.replace(FORWARD.problem, head_dim_v=0)),
        "head_dim_v 0",
    ),
    "digest": (dataclasses.replace(FORWARD, source_sha256="0" * 63), "source_sha256"),
    "resources": (dataclasses.replace(FORWARD, resources=Resources(-1, 0, 0, 0)), "below 0"),
    "entry": (with_kernel(entry="a\0b"), "no symbol"),
    "empty entry": (with_kernel(entry=""), "no symbol"),
    "no threads": (with_kernel(threads=0), "threads 0"),
    "many threads": (with_kernel(threads=2048), "threads 2048"),
    "part of a warp": (with_kernel(threads=33), "no whole warps"),
    "shared memory": (with_kernel(smem_bytes=1 << 18), "smem_bytes"),
    "negative shared memory": (with_kernel(smem_bytes=-1), "smem_bytes -1"),
    "tiles of no rows": (with_kernel(tile_rows=0), "tile_rows 0"),
    "tail": (with_kernel(tail_share=-1), "tail_share"),
    "group": (with_kernel(group_heads=0), "group_heads"),
    "no CTAs": (with_kernel(ctas=0), "ctas 0"),
    "NaN": (with_kernel(busy_ctas=float("nan")), "busy_ctas nan"),
    "blocks of no rows": (with_kernel(grid="row_blocks", row_block=0), "row_block 0"),
    "splits of no keys": (with_kernel(grid="splits", block_keys=0), "block_keys 0"),
    "block without CTAs": (with_kernel(block_ctas=0), "block_ctas"),
    "CTAs without blocks": (with_kernel(cta_blocks=0), "cta_blocks"),
    "workspace": (with_kernel(dq_floats=1 << 40), "dq_floats"),
    "workspace twice": (with_kernel(workspace=("tile_counter",) * 2), "more than once"),
    "workspace unnamed": (with_kernel(workspace=()), "tile_counter is a workspace"),
    "block too small": (with_kernel(params_bytes=8), "beyond the 8 bytes"),
    "block too large": (with_kernel(params_bytes=1 << 20), "params_bytes"),
    "negative block": (with_kernel(params_bytes=-8), "params_bytes -8"),
    "field beyond": (with_field(LAST, offset=1 << 16), "beyond the"),
    "field before": (with_field(LAST, offset=-4), "at -4 begins before"),
    "fields overlap": (with_field(LAST, offset=FIELDS[-2].offset), "begins before"),
    "field unaligned": (with_field(0, offset=4), "multiple of 64"),
    "field twice": (with_field(LAST, name=FIELDS[0].name), "more than once"),
    "field's name": (with_field(LAST, name="a b"), "no name of a parameter"),
    "no recipe": (with_kernel(tensor_maps=()), "has no tensor map"),
    "recipe twice": (with_kernel(tensor_maps=FORWARD.kernel.tensor_maps * 2), "more than once"),
    "recipe of no field": (with_map(field="map_x"), "is no tensor_map"),
    "recipe of a value": (with_map(field="lse"), "is no tensor_map"),
    "recipe of another kind": (with_map(paged=True), "is no page_map"),
    "tensor": (with_map(tensor="lse"), "tensor 'lse' is not one of"),
    "dtype": (with_map(dtype="fp32"), "dtype 'fp32'"),
    "box wider than the swizzle": (with_map(box_cols=65), "not 1 to 128 bytes"),
    "box of nothing": (with_map(box_cols=0), "not 1 to 128 bytes"),
    "box of odd bytes": (with_map(box_cols=3), "multiple of 16 bytes"),
    "box of many rows": (with_map(box_rows=257), "box_rows 257"),
    "L2": (with_map(l2_bytes=1), "l2_bytes 1"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_program_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, reason = CRAFTED[what]
    assert mistakes_of(FORWARD) == []
    assert any(reason in mistake for mistake in mistakes_of(binary)), mistakes_of(binary)
    with pytest.raises(LaunchError) as caught:  # without a driver
        monkeypatch.setattr(load, "driver", lambda: None)
        load.load(binary, b"", 0)
    assert reason in str(caught.value)


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    program = make_program(64, "ab")
    path = write(tmp_path / "x.attn", program)

    def edit(manifest: dict[str, Any]) -> None:
        for kernel in manifest["programs"][0]["kernels"]:
            kernel["binary"]["kernel"] |= {"threads": 7, "params_bytes": 4}

    edit_manifest(path, edit)
    with pytest.raises(BundleError) as caught:
        Bundle(path).verify()
    assert len(caught.value.reasons) == 2 * 3
    assert all(str(path) in reason for reason in caught.value.reasons)
    with pytest.raises(BundleError):
        Bundle(path).program(program.problem, "sm_90a")
    assert cubin_for("a") in [data for data in [Bundle(path).cubin(program.binaries[0])]]


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63, 2**64])
)
VALUES = st.one_of(NUMBERS, st.text(max_size=6), st.none(), st.booleans(), st.floats())


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        place
        for key, each in items
        for place in (_leaves(each, (*at, key)) if isinstance(each, (dict, list)) else [(*at, key)])
    ]


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(BINARIES),
    st.lists(st.tuples(st.integers(0, 10_000), VALUES), min_size=1, max_size=3),
)
def test_fuzz_what_is_let_through_packs_within_its_block(
    binary: Binary, changes: list[tuple[int, Any]]
) -> None:
    """Any values anywhere in a launch description: refused, or its parameters lie where they say,
    in the block, and each map has its recipe."""
    data = copy.deepcopy(to_data(binary.kernel))
    places = _leaves(data)
    for number, value in changes:
        place = places[number % len(places)]
        inner = data
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    try:
        kernel = from_data(KernelEntry, data)
    except ValueError:
        return
    if mistakes_of(dataclasses.replace(binary, kernel=kernel)):
        return
    layout = launch.pack_format(kernel)
    assert struct.calcsize(layout) <= kernel.params_bytes <= 4096
    for field in kernel.fields:
        before = dataclasses.replace(
            kernel, fields=tuple(each for each in kernel.fields if each.offset <= field.offset)
        )
        end = struct.calcsize(launch.pack_format(before))
        assert end == field.offset + FIELD_BYTES[field.type][0]
    recipes = {recipe.field for recipe in kernel.tensor_maps}
    assert recipes == {f.name for f in kernel.fields if f.type.endswith("_map")}
