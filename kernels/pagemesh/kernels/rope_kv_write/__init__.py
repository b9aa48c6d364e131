"""``rope_kv_write``: prepares a joined q, k, v product for attention, in one launch.

    q, k of every row normalised by head (when weights are given), rotated by its position;
    k and v written to their pages

joined      float [rows, heads + 2 * kv_heads, head_dim], contiguous heads, any row stride; q is
            MUTATED in place; k and v stay as they were, their results are in the pages
cosine      float32 [rows, head_dim / 2], contiguous (angles in radians); ``sine`` alike
pool        ``KvPool``; slots ``slots`` of ``layer`` are MUTATED
slots       int64 [rows]: page * page_size + slot, no slot twice; below 0: a row of padding, which
            writes nothing to pages
query_norm  float [head_dim] or None; ``key_norm`` alike; ``epsilon`` as in ``rms_norm``

The same as ``rms_norm``, ``rope`` and ``kv_write`` one after the other, which take five launches
and three passes over memory, but with float32 in between. For a GPU only: a CPU calls the three.
"""
