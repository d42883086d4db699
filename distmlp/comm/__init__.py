"""Everything between processes: launch, collectives, failures, signals, transports."""
