"""Optimizer states that are saved and loaded without being in memory together."""
