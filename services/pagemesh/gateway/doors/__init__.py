"""How requests come in: HTTP, the bus, whose they are."""
