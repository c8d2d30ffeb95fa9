"""The API server: transport, list and watch, decoding."""
