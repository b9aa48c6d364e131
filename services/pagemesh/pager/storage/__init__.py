"""Files and shared memory: the pool, its headers, its holders, and pages stored elsewhere."""
