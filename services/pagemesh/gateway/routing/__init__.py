"""Which workers take a request. Pure."""
