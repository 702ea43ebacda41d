"""Modes and normalisation."""
