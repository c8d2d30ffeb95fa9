"""Configuration: schema, loading, validation, quantities and durations."""
