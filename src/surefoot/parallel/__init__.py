"""Distributes one run over ranks, using PyTorch's own distributed engine."""
