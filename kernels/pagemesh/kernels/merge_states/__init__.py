"""``merge_states``: attention over parts of a context, merged into attention over all of it.

    total[r, h]  = log sum over s of exp(lse[r, h, s])
    out[r, h]    = sum over s of exp(lse[r, h, s] - total[r, h]) * states[r, h, s]

states  float32 [rows, heads, parts, head_dim]: each part's own attention, normalised
lse     float32 [rows, heads, parts], base e: log of the sum of its exponentials; minus infinity
        for a part without positions, whose state is not read
out     float [rows, heads, head_dim]; written, returned; 0 where no part has positions

Parts are taken in ascending order, so that the same parts give the same bits (the merge of
Flash-Decoding, Dao et al., 2023, and of cascade attention, Ye et al., 2024).
"""
