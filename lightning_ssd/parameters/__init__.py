"""Weights that wait on a drive between their uses."""
