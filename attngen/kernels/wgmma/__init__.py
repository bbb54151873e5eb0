"""Kernels that multiply by wgmma: Hopper's."""
