"""The files that weights and gradients wait in, and the pages of memory that show them."""
