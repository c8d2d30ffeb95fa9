"""The order of a sync, the schedule, the wiring, reload and state."""
