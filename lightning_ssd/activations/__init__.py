"""Saved activations: autograd's hooks, the life of each saved storage, and bringing it back in time."""
