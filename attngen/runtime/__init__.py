"""Launch programs: loaded, bound to values, launched and traced. No torch, no templates."""
