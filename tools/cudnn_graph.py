"""One graph of cuDNN's, through cudnn-frontend: tensors in, tensors out, a plan and its launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attngen.bench.peers import describe


class CudnnGraph:
    """A graph whose tensors are bound as they are named.

    cudnn: the package; handle: of its library; io: torch's dtype of tensors that say none.

    Raises: RuntimeError, of `compiled`, where cuDNN has no such graph.
    """

    def __init__(self, cudnn: Any, handle: Any, io: torch.dtype) -> None:
        kinds = cudnn.data_type
        self.types = {
            torch.float8_e4m3fn: kinds.FP8_E4M3,
            torch.float8_e5m2: kinds.FP8_E5M2,
            torch.bfloat16: kinds.BFLOAT16,
            torch.float32: kinds.FLOAT,
        }
        self.cudnn, self.handle = cudnn, handle
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        self.graph = cudnn.pygraph(
            io_data_type=self.types[io],
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=handle,
        )
        self.bound: dict[Any, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Any:
        """The node of an input."""
        sizes, strides = list(tensor.shape), list(tensor.stride())
        kind = self.types[tensor.dtype]
        node = self.graph.tensor(name=name, dim=sizes, stride=strides, data_type=kind)
        self.bound[node] = tensor
        return node

    def give(self, node: Any, tensor: Tensor) -> None:
        """Have an output written to a tensor."""
        node.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride()))
        node.set_data_type(self.types[tensor.dtype])
        self.bound[node] = tensor

    def compiled(self) -> Callable[[], None]:
        """A function that launches the graph."""
        graph = self.graph
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([self.cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
        except self.cudnn.cudnnGraphNotSupportedError as error:
            raise RuntimeError(f"cuDNN has no such graph: {error}") from error
        size = max(16, graph.get_workspace_size())
        workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
        return lambda: graph.execute(self.bound, workspace, handle=self.handle)


def cudnn_call(
    cudnn: Any,
    handle: Any,
    operation: str,
    given: dict[str, Tensor],
    results: dict[str, Tensor],
    *,
    drops: float,
    **options: Any,
) -> Callable[[], object]:
    """A graph of one operation in bf16, which returns its results but `Stats`, batch behind heads.
    given, results: by the operation's names for them; drops: the probability of dropout."""
    kinds = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT, handle=handle,
    )  # fmt: skip
    bound = {}

    def known(tensor: Tensor) -> Any:
        found = graph.tensor_like(tensor)
        bound[found] = tensor
        return found

    arguments = {key: known(tensor) for key, tensor in given.items()}
    if drops:
        words = torch.ones(2, 1, 1, 1, 1, dtype=torch.int64, device="cuda")
        arguments["dropout"] = (drops, *map(known, words))
    made = getattr(graph, operation)(**arguments, **options)
    for result, tensor in zip(made, results.values(), strict=True):
        result.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride()))
        if tensor.dtype == torch.float32:
            result.set_data_type(kinds.FLOAT)
        bound[result] = tensor
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    memory = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    out = [tensor.transpose(1, 2) for key, tensor in results.items() if key != "Stats"]

    def call() -> object:
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        graph.execute(bound, memory, handle=handle)
        return out if len(out) > 1 else out[0]

    return call


def find_cudnn(
    make: Callable[[Any], Any], versions: dict[str, str], absent: dict[str, str]
) -> Any:
    """Find the package and return what is made of it, None where it cannot be used; its version is
    noted, or why it is not there."""
    try:
        import cudnn  # type: ignore[import-not-found]

        made = make(cudnn)
        versions["cudnn"] = f"{cudnn.backend_version()}, cudnn-frontend {cudnn.__version__}"
    except Exception as error:  # a package that is broken is as good as absent
        absent["cudnn"] = describe(error)
        return None
    return made
