"""The model: loading, forward step, sampler, page pools as tensors, and the shared worker."""
