"""Features of a log: named quantities, computed once, when first asked for. They judge nothing.

`LogFeatures` holds all of them; a cause reads what it needs. A feature that cannot be computed from
what was recorded is None (or NaN, or empty), never a guess.
"""
