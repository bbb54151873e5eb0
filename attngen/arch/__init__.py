"""One module an architecture: its limits, its feasible tiles, its heuristics."""
