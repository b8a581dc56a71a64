"""Memory of the host: how much there is, how malloc gives it back, pools, mappings and budgets."""
