"""Talks to the API server: the only room that imports the kubernetes package."""
