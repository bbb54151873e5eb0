"""Launches that a call gives its kernels, of each pass, from the table of its arguments."""
