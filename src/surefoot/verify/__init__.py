"""Proofs that two runs are the same run."""
