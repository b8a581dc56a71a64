"""The first ten minutes on a CUDA card."""
