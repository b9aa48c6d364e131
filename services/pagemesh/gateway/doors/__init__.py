"""How requests come in: HTTP and the bus, keys and tenants, and work off the event loop."""
