"""Parity of any trainer with itself on one process: what an adapter imports, and the comparison as a function.

    from megatron_port.parity import Adapter, Batch, World

``megatron-port parity foreign FILE.py --ranks 4 --set tp=2`` reads the adapter in FILE.py, runs the trainer on one
process and on four, and says which tensor is the first wrong one and what it is of the right one.
"""

from __future__ import annotations

from megatron_port.tools.foreign.adapter import Adapter, Batch, Shard, World
from megatron_port.tools.foreign.compare import Finding, Verdict
from megatron_port.tools.foreign.relations import Relation
from megatron_port.tools.foreign.session import compare

__all__ = ["Adapter", "Batch", "Finding", "Relation", "Shard", "Verdict", "World", "compare"]
