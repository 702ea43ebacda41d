"""Verdicts on runs: against their contract, and against each other. It reads; it runs nothing."""
