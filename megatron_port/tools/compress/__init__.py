"""Smaller models out of trained ones: what is measured, what is kept, and the checkpoint that it makes."""
