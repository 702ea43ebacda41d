"""Everything that must survive a run's end, and how it is written, verified and read again."""
