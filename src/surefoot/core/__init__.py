"""Words that every room shares: errors, counts, findings, reports and pure arithmetic.

Never imports torch, pydantic or scipy.
"""
