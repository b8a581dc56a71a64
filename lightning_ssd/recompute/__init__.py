"""Blocks that run again in backward, exactly, instead of keeping what they computed."""
