"""Avalanche's side: its plugins, evaluator, loaders and arguments."""
