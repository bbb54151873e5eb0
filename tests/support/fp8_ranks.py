"""Ranks of a group, each a process, that train an FP8 layer: maxima are shared, parameters sharded.

python -m tests.support.fp8_ranks RANK RANKS STORE
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from attngen import fp8

STEPS, HEADS, DIM = 3, 2, 16
WIDTH = HEADS * DIM


class Block(nn.Module):
    """Projections around an attention of its own scales."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.bfloat16)
        self.attention = fp8.Attention(STEPS)
        self.back = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
        return x + self.back(self.attention(q, k, v, mask="causal").flatten(-2))


def model() -> nn.Module:
    """Two blocks, of the same numbers on each rank."""
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block())


def inputs(rank: int, number: int) -> Tensor:
    """A rank's own tokens of a step; one rank's are larger."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(2, 12, WIDTH, generator=generator) * (1 + rank)
    return x.bfloat16()


def train(trained: nn.Module, rank: int, recipe: fp8.DelayedScaling, **more: object) -> Tensor:
    """The output of the last of three steps, gradients of which stay."""
    for number in range(3):
        trained.zero_grad()
        with fp8.autocast(recipe=recipe, **more):  # type: ignore[arg-type]
            out = trained(inputs(rank, number))
        out.float().square().mean().backward()
    return out


def recipe_of(shared: bool = True) -> fp8.DelayedScaling:
    """Delayed scaling with a backward in 8 bits. shared: whether ranks share maxima."""
    return fp8.DelayedScaling(amax_history_len=STEPS, reduce_amax=shared, backward="fp8")


def history(trained: nn.Module) -> list[Tensor]:
    """Scales and histories of the layers, but for the backward's newest row, which the next step
    shares."""
    found = {name: x for name, x in trained.state_dict().items() if ".scales." in name}
    return [x[1:] if name.endswith("gradient_history") else x for name, x in found.items()]


def check_maxima(rank: int, ranks: int) -> None:
    """Scales are those of the largest magnitudes of the group, or of a rank's own."""
    for shared in (True, False):
        trained = model()
        train(trained, rank, recipe_of(shared))
        assert all(x.any() for x in history(trained))
        mine = torch.cat([x.flatten() for x in history(trained)])
        all_of_them = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(all_of_them, mine)
        equal = all(torch.equal(mine, other) for other in all_of_them)
        assert equal == shared, f"shared {shared}, equal {equal}"
    groups = [dist.new_group([each]) for each in range(ranks)]
    alone = model()
    train(alone, rank, recipe_of(), group=groups[rank])
    assert all(torch.equal(a, b) for a, b in zip(history(alone), history(trained), strict=True))


def check_sharded(rank: int, ranks: int) -> None:
    """FSDP2 gives what whole parameters give, for tokens that all ranks share."""
    recipe = recipe_of()
    whole, sharded = model(), model()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    wanted, found = train(whole, 0, recipe), train(sharded, 0, recipe)
    assert torch.equal(wanted, found)
    pairs = zip(whole.named_parameters(), sharded.named_parameters(), strict=True)
    for (name, x), (_, y) in pairs:
        gradient = y.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(gradient, x.grad, msg=name)
    assert all(torch.equal(a, b) for a, b in zip(history(whole), history(sharded), strict=True))
    again = model()
    for block in again:
        fully_shard(block, mesh=mesh)
    again.load_state_dict(sharded.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(history(again), history(sharded), strict=True))


def main() -> None:
    """One rank."""
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        check_maxima(rank, ranks)
        check_sharded(rank, ranks)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
