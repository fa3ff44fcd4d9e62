"""Does a run fit, how fast is it, and what would be better: pure arithmetic, no torch, no processes."""
