"""Faults, injected one at a time into an agent in this process: `python -m tests.faults` prints what happened."""
