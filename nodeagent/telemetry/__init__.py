"""Log, metrics, probes and the HTTP endpoint."""
