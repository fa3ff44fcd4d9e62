"""Mixers of positions beside grouped attention."""
