"""What is asked: specs, layouts, presets, problems. No chip, no torch."""
