"""Decisions before a pass: pure arithmetic from a trace to a plan. No I/O, no clock, no tensors."""
