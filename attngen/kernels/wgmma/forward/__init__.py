"""The forward, its tiles for short calls, and the one for the output alone."""
