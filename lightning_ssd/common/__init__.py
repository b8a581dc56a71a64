"""What several packages share, and what is of no package: tensors, devices, waiting, words."""
