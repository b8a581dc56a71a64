"""Save and load optimizer states without having all of them in memory at once."""
