"""Events, counters and metrics of a run, as numbers."""
