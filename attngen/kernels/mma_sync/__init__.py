"""Kernels of the products of a warp (mma.sync), which every target has."""
