"""Optimizer and parameter coverage."""
