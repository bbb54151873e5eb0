"""Few queries, whose keys are split among CTAs."""
