"""Vocabulary shared by all packages: errors, counts, findings, reports and pure arithmetic.

Never imports torch, pydantic or scipy.
"""
