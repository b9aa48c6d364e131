"""The engine on a GPU: the same plans, with Triton's kernels and torch's matrix products.

    weights    a checkpoint's tensors on the device
    rows       a step's rows in one transfer, padded to a bucket if a graph computes them
    launches   which rows attend by themselves, and which in blocks
    forward    the forward pass
    graphs     steps captured once per bucket, replayed (graph_bytes: what they take)
    decoder    ``step`` and ``logits``, as ``engine.forward.Decoder`` has them
    toolchain  what Triton needs of a machine
    driver, memory   device memory that several processes map

Nothing here touches CUDA at import. What can run on a CPU (all but graphs and memory) is tested
there, through Triton's interpreter; all of it has run on an H100 (``ops.bench.gpu``).
"""
