"""Benchmarks: attngen beside the public kernels, measured in one run.

`workloads` says what is computed, `peers` who computes it, `checking` when a result counts,
`timing` how long it took, `report` what follows from that; `run` composes them. A direction is an
entry of `workloads.FLOPS`, of `checking.EXPECT` and of each peer's `makers`. What reads keys rather
than multiplies stands apart: `decode`, and `decode_report`.
"""
