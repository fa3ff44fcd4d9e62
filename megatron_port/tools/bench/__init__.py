"""Measurements for the planner: one node calibrated, the studies of the paper run again."""
