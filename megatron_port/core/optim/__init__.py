"""Optimizer rules, flat buckets, ZeRO, gradient norms and clipping, schedules of learning rate and batch size."""
