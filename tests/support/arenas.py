"""Spill files of tests."""

from lightning_ssd.storage.spill_file import Arena

MIB = 1 << 20


def open_arena(directory, **changes):
    return Arena(directory, **({"block_bytes": 4096, "direct": False} | changes))
