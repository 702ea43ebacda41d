"""The state of a run that a checkpoint keeps, and how it is written, verified and read."""
