"""Specs, layouts, presets and problems: an attention as it is asked for, without a chip."""
