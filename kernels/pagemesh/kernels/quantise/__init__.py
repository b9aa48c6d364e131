"""``quantise`` and ``dequantise``: rows of numbers as codes and one scale per row (``kv_codes``).

    scale[r] = max |x[r]| / top                   top = 127 (int8) or 448 (e4m3)
    codes[r, i] = x[r, i] / scale[r]              rounded to the nearest, ties to even
    dequantise: codes[r, i] * scale[r]

x       float [rows, width], contiguous rows
codes   ``torch.int8`` or ``torch.float8_e4m3fn`` [rows, width]
scales  float32 [rows]; 0 for a row of zeros, NaN for a row with a value that is not finite

The encoding of K and V in pages, for whole matrices on a GPU; the reference is ``kv_codes`` itself.
"""
