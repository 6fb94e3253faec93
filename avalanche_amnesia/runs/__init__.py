"""Whole runs: the main job and the command line."""
