"""Bundles: written, read, found by calls, and put into wheels."""
