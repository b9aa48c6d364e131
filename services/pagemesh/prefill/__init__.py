"""The prefill role: turn prompts into KV pages and hand them over by ticket."""
