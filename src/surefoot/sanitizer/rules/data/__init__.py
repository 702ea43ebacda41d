"""Logging and data."""
