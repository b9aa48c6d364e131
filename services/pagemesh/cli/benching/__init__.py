"""How fast a server answers: prompts, the load, and what is told of it."""
