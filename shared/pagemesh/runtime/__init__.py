"""What every service stands on: actors, supervision, the bus, clock, configuration, telemetry."""
