"""Helpers that tests of every package share."""
