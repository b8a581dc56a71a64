"""Where bytes live and how they move. Knows nothing of autograd or Lightning."""
