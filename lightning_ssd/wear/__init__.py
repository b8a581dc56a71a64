"""Wear of the drives: bytes written, bytes that may still be, and days that they last."""
