"""Keeps what was seen, decided and done: records and state that survive a restart."""
