"""Files, locks, trust, and the text and JSON forms of values; of no attention at all."""
