"""What lies in files and shared memory: the pool, its headers, stored pages; who holds it."""
