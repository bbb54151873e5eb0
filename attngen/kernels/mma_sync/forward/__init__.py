"""The forward of prompts by products of warps."""
