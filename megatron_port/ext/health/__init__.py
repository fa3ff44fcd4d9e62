"""Whether a step can be trusted: limits, anomalies, replays, replica and gradient checks, profiles."""
