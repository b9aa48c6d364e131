"""The decode role: attach to KV pages and turn them into tokens."""
