"""Clipping and gradient lifecycle."""
