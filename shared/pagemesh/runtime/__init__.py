"""What every service is built on: actors, supervision, the bus, clock, configuration, telemetry."""
