"""Decisions: pure arithmetic. No I/O, no clock, no tensors."""
