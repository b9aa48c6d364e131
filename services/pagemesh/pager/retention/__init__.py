"""Pins, and the invalidation of roots and prefixes. Pure."""
