"""Continual learning that can forget on request, as a plugin package for Avalanche."""

__version__ = "0.1.0"
