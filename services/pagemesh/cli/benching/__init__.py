"""How fast a server answers: prompts, load, client and report."""
