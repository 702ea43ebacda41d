"""Resume and precision."""
