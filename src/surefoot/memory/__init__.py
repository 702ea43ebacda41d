"""Trades of time for memory. None of them changes a result."""
