"""Leases: sequences are admitted, queued, filled, forked, handed over and preempted. Pure."""
