"""Shows: tables, JSON, metrics. Changes nothing."""
