"""Flight recorder, state file and status file."""
