"""Wear of the drives: bytes written, ratings, and days that they last."""
