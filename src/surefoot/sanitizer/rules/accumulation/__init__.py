"""Accumulation."""
