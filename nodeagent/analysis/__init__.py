"""Offline work on recordings: simulation, comparison, tuning, and the history that a Prometheus has."""
