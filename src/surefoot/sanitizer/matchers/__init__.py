"""What several rules look for: listeners that one audit makes once and shares, and functions."""
