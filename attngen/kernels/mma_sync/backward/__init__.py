"""The backward by products of warps."""
