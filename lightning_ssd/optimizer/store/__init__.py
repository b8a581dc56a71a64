"""Where the bytes of optimizer states are: in memory, on a drive, or on the way."""
