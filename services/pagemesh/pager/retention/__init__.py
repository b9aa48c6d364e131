"""What operators have kept or dropped: pins, and roots that are invalidated. Pure."""
