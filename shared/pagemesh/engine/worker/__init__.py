"""The worker that both roles share: one scheduler and one step loop."""
