"""Verdicts on runs: against their contract, and against each other. Read-only."""
