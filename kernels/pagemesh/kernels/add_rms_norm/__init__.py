"""``add_rms_norm``: adds to a residual stream, and normalises the sum.

    stream[r] += addend[r]
    out[r] = stream[r] / sqrt(mean(stream[r] ** 2) + epsilon) * weight

stream  float [rows, width], rows contiguous; MUTATED; the sum is normalised before it is rounded
        to the stream's type
addend  float [rows, width], rows contiguous
weight  float [width], contiguous
out     float [rows, width]; written, returned

One pass over memory instead of two, and one launch. For a GPU only: on a CPU ``torch`` adds, and
``rms_norm`` normalises.
"""
