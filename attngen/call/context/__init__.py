"""Tokens of sequences over several devices: who holds which, and what each computes of them."""
