"""Decides: pure functions of (snapshot, state, now). No I/O, no clock, no threads."""
