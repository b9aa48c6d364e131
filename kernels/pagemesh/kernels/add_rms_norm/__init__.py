"""``add_rms_norm``: a residual stream takes an addend, and its norm is what comes next.

    stream[r] += addend[r]
    out[r] = stream[r] / sqrt(mean(stream[r] ** 2) + epsilon) * weight

stream  float [rows, width], rows contiguous; MUTATED; what is normalised is the sum before it is
        rounded to the stream's type
addend  float [rows, width], rows contiguous
weight  float [width], contiguous
out     float [rows, width]; written, returned

One pass over memory instead of two, and one launch. On a GPU; a CPU adds and normalises by
``torch`` and ``rms_norm``.
"""
