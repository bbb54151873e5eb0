"""Wrappers of instructions that kernels of warps' products are made of."""

from __future__ import annotations

# Those that attngen/mma/atoms.cuh includes.
ATOMS = frozenset({"cute/arch/copy_sm75.hpp", "cute/arch/copy_sm80.hpp", "cute/arch/mma_sm80.hpp"})
# Those that attngen/mma/atoms_fp8.cuh includes, too.
ATOMS_FP8 = ATOMS | {"cute/arch/mma_sm89.hpp"}
