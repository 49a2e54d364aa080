"""Public names (filled in by pipeline)."""
