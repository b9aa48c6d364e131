"""Kernels: one folder per operation (contract, reference, backends) and the native library."""
