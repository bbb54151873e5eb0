"""Target: one GPU architecture as a value, and the only list of them.

A heuristic that was measured stands with the family of kernels that it belongs to, and names the
chip that it was measured on; here stand facts of the architecture alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import SpecError

VARIABLE = "ATTNGEN_TARGET"
Instruction = Literal["cp_async", "griddepcontrol", "setmaxnreg", "tma", "wgmma"]
# Capabilities of embedded chips. CUDA programming guide, binary compatibility: none among these,
# nor between them and others.
EMBEDDED = ((8, 7),)


@dataclass(frozen=True)
class Target:
    """One architecture, by the name that the compiler has for it.

    capability: compute capability of its devices, major and minor. sm_smem_bytes: shared memory of
    an SM, of which the driver keeps cta_reserved_bytes for each CTA. sm_registers: 32-bit registers
    of an SM. instructions: what kernels use that not every architecture has: copies that threads
    start and await, programmatic dependent launch, registers moved between warpgroups, the copy
    engine, and products of warpgroups. fp8: whether its tensor cores multiply FP8; warp_fp8:
    whether those of a warp (mma.sync) do, and not 16 bits that both operands become first.
    mma_flops: dense 8-bit FLOPs of an SM's tensor cores in one cycle, half as many of 16 bits.
    exponentials: those of an SM in one cycle. chip: the chip whose measurements choose plans where
    ATTNGEN_CHIP names no other. exact: whether its cubins run on devices of its own capability
    alone, not on those of later minor versions.
    """

    name: str
    capability: tuple[int, int]
    sm_smem_bytes: int
    cta_reserved_bytes: int
    sm_registers: int
    instructions: frozenset[Instruction]
    fp8: bool
    warp_fp8: bool
    mma_flops: int
    exponentials: int
    chip: str
    exact: bool = False

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

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether devices of that compute capability run its cubins, if their shared memory holds
        what a kernel asks for: later minor versions of its major do, but for those of embedded
        chips, which run their own alone."""
        if self.exact or capability in EMBEDDED:
            return capability == self.capability
        (major, minor), (own_major, own_minor) = capability, self.capability
        return major == own_major and minor >= own_minor


# Hopper. Rates: H100 datasheet, 1978.9 TFLOP/s on 132 SMs at 1.83 GHz; CUDA programming guide,
# arithmetic throughput and technical specifications of compute capability 9.0.
_HOPPER = Target(
    name="sm_90a",
    capability=(9, 0),
    sm_smem_bytes=228 << 10,
    cta_reserved_bytes=1024,
    sm_registers=1 << 16,
    instructions=frozenset({"cp_async", "griddepcontrol", "setmaxnreg", "tma", "wgmma"}),
    fp8=True,
    warp_fp8=False,
    mma_flops=8192,
    exponentials=16,
    chip="nvidia-h200",
    exact=True,
)
# Hopper without what cubins of one capability alone may have.
_HOPPER_PORTABLE = replace(
    _HOPPER,
    name="sm_90",
    instructions=frozenset({"cp_async", "griddepcontrol", "tma"}),
    exact=False,
)
# Ampere. Rates: A100 datasheet, 624 TOPS of 8 bits on 108 SMs at 1.41 GHz; A10's, 250 on 72 at
# 1.695 GHz; Jetson AGX Orin's, 85 without sparsity on 16 at 1.3 GHz. Sizes here and below: CUDA
# programming guide, technical specifications.
_AMPERE = Target(
    name="sm_80",
    capability=(8, 0),
    sm_smem_bytes=164 << 10,
    cta_reserved_bytes=1024,
    sm_registers=1 << 16,
    instructions=frozenset({"cp_async"}),
    fp8=False,
    warp_fp8=False,
    mma_flops=4096,
    exponentials=16,
    chip="nvidia-a100",
)
_AMPERE_86 = replace(
    _AMPERE,
    name="sm_86",
    capability=(8, 6),
    sm_smem_bytes=100 << 10,
    mma_flops=2048,
    chip="nvidia-a10",
)
_ORIN = replace(_AMPERE, name="sm_87", capability=(8, 7), chip="jetson-agx-orin", exact=True)
# Ada. Rate: L40S datasheet, 733 TFLOP/s of FP8 on 142 SMs at 2.52 GHz.
_ADA = replace(
    _AMPERE_86, name="sm_89", capability=(8, 9), fp8=True, warp_fp8=True, chip="nvidia-l40s"
)
# Blackwell of graphics cards and workstations. Rate: RTX PRO 6000, 1008 TFLOP/s of FP8 on 188 SMs
# at 2.6 GHz.
_BLACKWELL_120 = replace(
    _ADA,
    name="sm_120",
    capability=(12, 0),
    instructions=frozenset({"cp_async", "griddepcontrol", "tma"}),
    chip="nvidia-rtx-pro-6000-blackwell",
)
_BLACKWELL_121 = replace(_BLACKWELL_120, name="sm_121", capability=(12, 1), chip="nvidia-gb10")
# Of one capability the one that devices have unless another is named comes first.
_ALL = (
    *(_HOPPER, _HOPPER_PORTABLE, _AMPERE, _AMPERE_86, _ORIN, _ADA),
    *(_BLACKWELL_120, _BLACKWELL_121),
)
TARGETS: dict[str, Target] = {each.name: each for each in _ALL}
DEFAULT = _HOPPER  # of specs that name none, and of traces without a GPU
NAMED = os.environ.get(VARIABLE, "")


def names() -> tuple[str, ...]:
    """Names of all architectures."""
    return tuple(TARGETS)


def assumed() -> str:
    """The name of the architecture of devices that are not here: the one that ATTNGEN_TARGET names,
    else the default. Raises: SpecError where it names none."""
    if NAMED and NAMED not in TARGETS:
        known = ", ".join(TARGETS)
        raise SpecError(f"{VARIABLE}={NAMED[:80]!r} is no architecture; known: {known}")
    return NAMED or DEFAULT.name


def earlier_of(name: str) -> tuple[Target, ...]:
    """The architectures of earlier minor versions whose cubins devices of the named one run, the
    latest first; none of one that is unknown."""
    known = TARGETS.get(name)
    if known is None:
        return ()
    found = (each for each in TARGETS.values() if each.runs_on(known.capability))
    older = (each for each in found if each.capability < known.capability)
    return tuple(sorted(older, key=lambda each: each.capability, reverse=True))


def of_capability(capability: tuple[int, int]) -> Target | None:
    """The architecture whose kernels devices of that compute capability run: the one that
    ATTNGEN_TARGET names, else theirs, else the latest of an earlier minor version; None where there
    is none.

    Raises: SpecError where ATTNGEN_TARGET names none, or one whose cubins do not run there.
    """
    if NAMED:
        named = TARGETS.get(NAMED)
        if named is None or not named.runs_on(capability):
            fitting = [each.name for each in TARGETS.values() if each.runs_on(capability)]
            major, minor = capability
            raise SpecError(
                f"{VARIABLE}={NAMED[:80]!r}: devices of compute capability {major}.{minor} run "
                f"kernels of {', '.join(fitting) or 'no architecture'}"
            )
        return named
    latest = None
    for each in TARGETS.values():  # torch.compile traces this, and would not max() with a key
        if each.capability == capability:
            return each
        if each.runs_on(capability) and (latest is None or each.capability > latest.capability):
            latest = each
    return latest
