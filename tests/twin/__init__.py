"""A second implementation of a training run, from evidence/definitions.md alone: torch, numpy, the standard library.

It shares no line with ``megatron_port`` (``tests/unit/test_twin_imports.py`` enforces that), so an error in the
program's loop, schedule, data order, random streams, update or metrics shows as a difference. One process, plain
autograd, every sample of a batch at once.
"""
