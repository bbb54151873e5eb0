"""Ranks of a group, each a process: calls of DTensors against those of whole tensors.

python -m tests.support.sharding_kit RANK RANKS STORE
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask

import attngen
from tests.support.autograd_kit import OnReference

B, S, T, HQ, HKV, D = 5, 6, 7, 8, 4, 16
OPERANDS = {"q": (B, S, HQ, D), "k": (B, T, HKV, D), "v": (B, T, HKV, D)}
WHOLE, BATCH, HEADS = Replicate(), Shard(0), Shard(2)
MESHES = {"ranks": (4,), "rows and columns": (2, 2)}


@dataclass
class Case:
    """shapes: of q, k and v and what has a gradient besides; more: tensors without one, by name;
    functions: arguments that are some, of the tensor `table` that they close over; heads_axis: that
    of q."""

    shapes: dict = field(default_factory=dict)
    more: dict = field(default_factory=dict)
    call: dict = field(default_factory=dict)
    functions: Callable | None = None
    heads_axis: int = 2


make = torch.Generator().manual_seed(1)  # each rank the same
USED = torch.tensor([3, 0, 6, 5, 1], dtype=torch.int32)
SLOPES, KEPT = torch.rand(B, HQ, generator=make), torch.rand(B, 1, 1, T, generator=make) > 0.3


def scores(table: Tensor) -> dict:
    """A score that tells sequences and heads apart, of a table of them that learns."""
    return {"score_mod": lambda s, b, h, i, j: s * table[b, h] + b - 0.25 * h * (i - j).abs()}


def shown(table: Tensor) -> dict:
    """A mask that tells sequences and heads apart."""
    return {"mask_mod": lambda b, h, i, j: (i + 2 * j + b + h) % 3 != 0}


def blocks(table: Tensor) -> dict:
    """A BlockMask of each sequence and head, beside a score."""
    made = create_block_mask(shown(table)["mask_mod"], B, HQ, S, T, device="cpu", BLOCK_SIZE=2)
    return {"block_mask": made, **scores(table)}


TABLE = {"table": (B, HQ)}
CASES = {
    "score": Case(shapes=TABLE, functions=scores),
    "mask": Case(functions=shown),
    "blocks": Case(shapes=TABLE, functions=blocks),
    "plain": Case(call={"mask": "causal_bottom_right", "window": (4, 0)}),
    "bias": Case(shapes={"bias": (B, HQ, S, T)}),
    "bias of the batch": Case(shapes={"bias": (B, 1, S, T)}, call={"bias_type": "pre_scale"}),
    "bias of heads": Case(shapes={"bias": (HQ, S, T)}),
    "bias of all": Case(shapes={"bias": (S, T)}),
    "sink": Case(shapes={"sink": (HQ,)}, call={"softmax": "learnable"}),
    "largest": Case(call={"return_max_logit": True, "mask": "causal"}),
    "own slopes": Case(call={"alibi_slopes": True, "mask": "causal"}),
    "slopes": Case(more={"alibi_slopes": SLOPES[0]}),
    "slopes of the batch": Case(more={"alibi_slopes": SLOPES}),
    "attn_mask": Case(more={"attn_mask": KEPT}),
    "prefixes": Case(more={"prefix": USED}, call={"mask": "prefix"}),
    "lengths": Case(
        more={"seqused_q": USED, "seqused_kv": USED},
        call={"mask": "padding_causal"},
    ),
    "one tensor": Case(shapes={"q": (B, S, 3, HQ, D)}, call={"layout": "bs3hd"}, heads_axis=3),
}  # fmt: skip
ON_KERNELS = ("plain", "bias of the batch", "sink", "own slopes", "lengths")
PACKED = Case(
    shapes={"q": (9, HQ, D), "k": (9, HKV, D), "v": (9, HKV, D)},
    more={n: torch.tensor([0, 4, 9], dtype=torch.int32) for n in ("cu_seqlens_q", "cu_seqlens_kv")},
    call={"layout": "thd", "mask": "padding_causal"},
    heads_axis=1,
)


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Operands of a case, the same on each rank."""
    make = torch.Generator().manual_seed(0)
    shapes = case.shapes if "q" in case.shapes else OPERANDS | case.shapes
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.randn(shape, generator=make)
        if name not in ("sink", "table"):
            made[name] = made[name].bfloat16()
    return made | case.more


def results(case: Case, tensors: dict, call=attngen.attention) -> tuple:
    """Outputs, and the gradients of what has one."""
    leaves = [x.requires_grad_() for n, x in tensors.items() if n not in case.more]
    functions = {} if case.functions is None else case.functions(tensors.get("table"))
    given = {n: x for n, x in tensors.items() if n != "table"}
    out, aux = call(**given, **case.call, **functions, return_lse=True)
    weights = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)
    if isinstance(out, DTensor):
        weights = distribute_tensor(weights, out.device_mesh, [WHOLE] * out.device_mesh.ndim)
    loss = (out * weights).float().sum() + aux.lse.clamp(min=-9).sin().sum()
    gradients = torch.autograd.grad(loss, leaves)
    largest = () if aux.max_logit is None else (aux.max_logit,)
    return (out, aux.lse, *largest, *gradients)


def check(case: Case, mesh: DeviceMesh, placed: tuple, call=attngen.attention) -> None:
    """Raises: AssertionError."""
    whole = tensors_of(case)
    expected = results(case, {n: x.clone() for n, x in whole.items()})
    given = {}
    for name, x in whole.items():
        at = placed if name in ("q", "k", "v") else (WHOLE,) * mesh.ndim
        given[name] = distribute_tensor(x, mesh, at)
    found = results(case, given, call)
    axis = found[0].ndim - 2
    of_output = tuple(Shard(axis) if place == Shard(case.heads_axis) else place for place in placed)
    assert tuple(found[0].placements) == of_output, found[0].placements
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, DTensor) and one.shape == other.shape
        torch.testing.assert_close(one.full_tensor(), other, rtol=2e-2, atol=2e-2)


def every_check(ranks: int, path: str) -> None:
    """All cases on all meshes; Raises: AssertionError."""
    for sizes in MESHES.values():
        mesh = init_device_mesh("cpu", sizes)
        for name, case in CASES.items():
            if path == "kernels" and name not in ON_KERNELS:
                continue
            heads = Shard(case.heads_axis)
            ways = [(WHOLE,), (BATCH,), (heads,)]
            if len(sizes) == 2:
                ways = [(BATCH, heads), (heads, WHOLE), (BATCH, BATCH)]
            for placed in ways:
                try:
                    check(case, mesh, placed)
                except Exception as error:
                    raise AssertionError(f"{path}, {name}, {placed} of {sizes}") from error
    mesh = init_device_mesh("cpu", (ranks,))
    check(PACKED, mesh, (Shard(1),))
    check_mixed(mesh)
    compiled = torch.compile(attngen.attention, backend="aot_eager", fullgraph=True)
    check(CASES["plain"], mesh, (BATCH,), compiled)


def check_mixed(mesh: DeviceMesh) -> None:
    """Operands that are whole, or a sum that is due, are sharded as the others are."""
    q, k, v = (tensors_of(CASES["plain"])[name] for name in "qkv")
    parts = [distribute_tensor(k, mesh, [HEADS]), distribute_tensor(v, mesh, [WHOLE])]
    share = DTensor.from_local(q / mesh.size(), mesh, [Partial()], run_check=False)
    out = attngen.attention(share, *parts)
    assert tuple(out.placements) == (HEADS,)
    want = attngen.attention(q, k, v)
    torch.testing.assert_close(out.full_tensor(), want, rtol=2e-2, atol=2e-2)


def main() -> None:
    rank, ranks = map(int, sys.argv[1:3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=ranks, init_method=f"file://{sys.argv[3]}"
    )
    try:
        every_check(ranks, "reference")
        patch = pytest.MonkeyPatch()
        OnReference(patch)
        every_check(ranks, "kernels")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
