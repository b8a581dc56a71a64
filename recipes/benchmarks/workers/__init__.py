"""Processes that the benchmarks start: each trains in one mode, a step at a time."""
