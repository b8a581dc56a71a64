"""Strategies for Lightning's Trainer and Fabric: the only package that uses Lightning's private parts."""
