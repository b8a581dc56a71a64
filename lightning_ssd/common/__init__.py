"""Shared building blocks: tensors, devices, threads that wait, interrupts, checks of settings, text for messages."""
