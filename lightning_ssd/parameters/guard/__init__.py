"""Uses of a weight outside of its unit's forward: each brings it back, or has it stay."""
