"""A call of attention before any tensor library: its table of arguments, its key, its cache."""
