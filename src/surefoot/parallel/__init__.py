"""How one run is laid out over ranks. The distributed engine is PyTorch's own."""
