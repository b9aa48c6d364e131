"""Sequences and their pages: admitted, waiting, filled, forked, handed over, taken back. Pure."""
