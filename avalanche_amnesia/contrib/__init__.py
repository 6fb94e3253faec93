"""Beside the core: baselines, dense subnets, further metrics, streams, and forms of the method that some need."""
