"""Weights other than the plain ones: adapters, factors, masks, averages, shared layers, upcycled experts."""
