"""The run of one process, its half-precision emulation, reduction orders, recording and comparison."""
