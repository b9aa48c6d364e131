"""The native library and what shares memory through it: pool files and page headers.

Nothing in here imports torch, so the pager can use all of it.
"""
