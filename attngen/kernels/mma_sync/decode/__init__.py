"""The decode by products of warps."""
