"""Readers of finished and running runs. They change nothing."""
