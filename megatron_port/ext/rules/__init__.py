"""Optimizer rules beside AdamW and the elementwise ones."""
