"""The live view on a terminal, and the same frame as a picture."""
