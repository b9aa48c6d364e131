"""How requests come in: HTTP, the bus, whose they are; what is done off the event loop."""
