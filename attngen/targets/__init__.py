"""Architectures: what a kernel may take for granted of the chips that it is compiled for."""
