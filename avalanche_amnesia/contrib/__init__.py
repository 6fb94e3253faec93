"""Optional parts: baselines, metrics, data streams, and compensation of an unlearning by shadow copies or repair."""
