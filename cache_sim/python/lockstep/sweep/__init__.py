"""One search over many machines: `lockstep sweep` (cache_sim/python/sweep.md)."""
