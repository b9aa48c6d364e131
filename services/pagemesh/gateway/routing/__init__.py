"""The choice of workers for a request. Pure."""
