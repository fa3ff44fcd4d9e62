"""Parity of other trainers: one process against their ranks, and what relation a wrong tensor has to the right one."""
