"""Files: atomic writes, a log that survives its own deletion, the lock of a run folder."""
