"""Optimizer rules by what they need, flat buckets, ZeRO, norms, schedules of rate and batch."""
