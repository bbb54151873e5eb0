"""A ParallelStyle of torch's tensor parallelism whose modules attend over a mesh."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ....call.context.order import AnyOrder
from .choice import Comm
from .sdpa import over_group


class ContextParallel(ParallelStyle):
    """Modules whose `scaled_dot_product_attention` attends over the mesh of `parallelize_module`.

    Their inputs and outputs are what this rank holds, as plain tensors. comm, order: as of
    `attngen.parallel.attention`.
    """

    def __init__(self, *, comm: Comm = "p2p", order: AnyOrder = "dual_chunk") -> None:
        super().__init__()
        self.comm, self.order = comm, order

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        forward = module.forward

        def over_mesh(*given: Any, **named: Any) -> Any:
            with over_group(device_mesh, comm=self.comm, order=self.order):
                return forward(*given, **named)

        module.forward = over_mesh
        return module
