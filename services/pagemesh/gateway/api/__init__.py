"""OpenAI's JSON: what clients send, and what they get. Pure."""
