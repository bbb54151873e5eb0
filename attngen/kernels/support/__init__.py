"""Kernels of no architecture, which run before or after others."""
