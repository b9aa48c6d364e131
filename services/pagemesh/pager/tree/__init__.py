"""What is cached: prefix trees, whose each edge is, how long it stays, how it leaves. Pure."""
