"""Target: one GPU architecture as a value, and the only list of them.

A heuristic that was measured stands with the family of kernels that it belongs to, and names the
chip that it was measured on; here stand facts of the architecture alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

Instruction = Literal["griddepcontrol", "setmaxnreg", "tma", "wgmma"]


@dataclass(frozen=True)
class Target:
    """One architecture, by the name that the compiler has for it.

    capability: compute capability of its devices, major and minor. sm_smem_bytes: shared memory of
    an SM, of which the driver keeps cta_reserved_bytes for each CTA. sm_registers: 32-bit registers
    of an SM. instructions: what kernels use that not every architecture has: programmatic dependent
    launch, registers moved between warpgroups, the copy engine, and products of warpgroups. fp8:
    whether its tensor cores multiply FP8. mma_flops: dense 8-bit FLOPs of an SM's tensor cores in
    one cycle, half as many of 16 bits. exponentials: those of an SM in one cycle. chip: the chip
    whose measurements choose plans where ATTNGEN_CHIP names no other.
    """

    name: str
    capability: tuple[int, int]
    sm_smem_bytes: int
    cta_reserved_bytes: int
    sm_registers: int
    instructions: frozenset[Instruction]
    fp8: bool
    mma_flops: int
    exponentials: int
    chip: str

    @property
    def cta_smem_bytes(self) -> int:
        """Shared memory that a CTA may use where it has an SM to itself."""
        return self.smem_share(1)

    def smem_share(self, ctas: int) -> int:
        """Shared memory that each of `ctas` CTAs on one SM may use."""
        return self.sm_smem_bytes // ctas - self.cta_reserved_bytes

    def lacks(self, needed: Collection[Instruction]) -> Iterator[str]:
        """A sentence for each instruction of these that the architecture does not have."""
        for instruction in sorted(set(needed) - self.instructions):
            yield f"{self.name} has no {instruction}"


# Hopper. Rates: H100 datasheet, 1978.9 TFLOP/s on 132 SMs at 1.83 GHz; CUDA programming guide,
# arithmetic throughput and technical specifications of compute capability 9.0.
_HOPPER = Target(
    name="sm_90a",
    capability=(9, 0),
    sm_smem_bytes=228 << 10,
    cta_reserved_bytes=1024,
    sm_registers=1 << 16,
    instructions=frozenset({"griddepcontrol", "setmaxnreg", "tma", "wgmma"}),
    fp8=True,
    mma_flops=8192,
    exponentials=16,
    chip="nvidia-h200",
)
TARGETS: dict[str, Target] = {each.name: each for each in (_HOPPER,)}
DEFAULT = _HOPPER  # of specs that name none, and of traces without a GPU


def names() -> tuple[str, ...]:
    """Names of all architectures."""
    return tuple(TARGETS)


def of_capability(capability: tuple[int, int]) -> Target | None:
    """The architecture of devices of that compute capability; None where there is none."""
    return next((each for each in TARGETS.values() if each.capability == capability), None)
