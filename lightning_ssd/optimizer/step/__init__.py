"""The user's own step, subgroup by subgroup: what it may be called with, and with which states."""
