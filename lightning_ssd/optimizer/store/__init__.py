"""Hold the bytes of optimizer states in memory and on drives, and move them between the two."""
