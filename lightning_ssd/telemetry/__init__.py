"""What happened, as numbers: events, counters, metrics, and the summary of a run."""
