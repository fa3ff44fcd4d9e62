"""Trials of layouts, measured through the harness; their results file; strategies that choose them (no torch)."""
