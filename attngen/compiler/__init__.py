"""From a problem to a binary: NVRTC, cache keys, the cache, builds of many specs."""
