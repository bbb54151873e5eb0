"""Kernel families: plans and rendered sources."""
