"""Bytes on a drive: directories, spill files, and the backends that move bytes to and from them."""
