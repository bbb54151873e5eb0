"""Attention over a group of devices, from torch: parts of a call, their messages, their sums."""
