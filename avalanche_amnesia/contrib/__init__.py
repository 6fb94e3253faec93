"""Optional parts: baselines, metrics, data streams, and two ways to limit an unlearning's damage to other tasks."""
