"""Fuzzing of every parser: `targets` has the table, `engine` runs it, `python -m tests.fuzz` is the command.

The property of each target: whatever bytes it gets, it returns a value or raises its own documented error, takes at
most `engine.LIMIT_S` of CPU and `engine.LIMIT_BYTES` of memory. `tests/data/fuzz/NAME` has the inputs that once reached
new code or once found a defect; every run begins with them.
"""
