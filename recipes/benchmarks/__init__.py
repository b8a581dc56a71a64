"""Benchmarks: each file is a command; see `docs/results` for what they measured."""
