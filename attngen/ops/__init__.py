"""Frontends: attngen as torch operations."""
