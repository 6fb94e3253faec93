"""Avalanche plugins: masks, trajectories, unlearning, compensation and seeding."""
