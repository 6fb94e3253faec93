"""Optional parts: baselines, additional metrics, data streams, shadow copies and repair."""
