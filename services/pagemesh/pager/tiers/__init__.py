"""Memory and disk behind the pool: what is stored there, and fetched from there. Pure."""
