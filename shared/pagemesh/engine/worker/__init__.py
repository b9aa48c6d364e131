"""The worker both roles share: one scheduler, one step loop."""
