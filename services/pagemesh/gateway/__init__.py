"""Front doors (HTTP and bus), routing, and the life of one request."""
