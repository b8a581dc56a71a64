"""Drives that fail and processes that die, on purpose and many times."""
