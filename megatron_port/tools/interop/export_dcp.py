"""Export to torch's distributed checkpoint (``torch.distributed.checkpoint``, "DCP").

Keys are what a nested ``{"model": …, "optimizer": {"state": …}}`` flattens to::

    model.layers.0.attention.qkv.weight                      float32 masters
    optimizer.state.layers.0.attention.qkv.weight.exp_avg
    optimizer.state.layers.0.attention.qkv.weight.exp_avg_sq
    optimizer.state.layers.0.attention.qkv.weight.step       float32, 0-dim

torch's own writer does the writing; our planner gives it chunks of at most
:data:`CHUNK_BYTES` that are read from the checkpoint when their turn comes, and
takes the memory of each back when the next is asked for. Peak memory is about
two chunks, whatever the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner, save
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.checkpoint.slices import slabs
from megatron_port.core.dist.state import BUFFER, WEIGHT
from megatron_port.core.errors import CheckpointError
from megatron_port.tools.interop.folder import building
from megatron_port.tools.interop.sidecar import write_sidecar

CHUNK_BYTES = 1 << 26
_STEPS = "optimizer_steps"


def dcp_key(name: str, kind: str) -> str:
    """The key of one of our tensors; ``kind`` may also be ``step``."""
    return ".".join(dcp_path(name, kind))


def dcp_path(name: str, kind: str) -> tuple[str, ...]:
    """Return the path of a tensor in the nested state dict."""
    return ("model", name) if kind in (WEIGHT, BUFFER) else ("optimizer", "state", name, kind)


def export_dcp(checkpoint: Checkpoint, out: Path, *, chunk_bytes: int = CHUNK_BYTES) -> Path:
    """Write ``checkpoint`` to the new folder ``out``. Returns it.

    Raises:
        CheckpointError: the source is damaged, ``out`` exists, or the disk is full or refuses.
    """
    planner = _Planner(checkpoint, chunk_bytes)
    with building(out, planner.bytes) as part:
        try:
            # No overlap with a GPU copy: chunks are resolved one after the other, each after the last was written.
            writer = FileSystemWriter(part, per_thread_copy_ahead=0, sync_files=False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
                save({}, storage_writer=writer, planner=planner, no_dist=True)
        except Exception as error:  # DCP wraps what a rank raised
            _unwrap(error)
            raise
        write_sidecar(part, checkpoint, "canonical")
    return out


def _unwrap(error: Exception) -> None:
    """Raise what a planner or the file system raised inside torch's wrapper, if that is what it is."""
    failures = getattr(error, "failures", {})
    for inner in failures.values():
        cause: Any = inner[0] if isinstance(inner, tuple) else inner
        if isinstance(cause, (CheckpointError, OSError)):
            raise cause from None


class _Planner(SavePlanner):
    """One write item a chunk; data is read when the item is written."""

    def __init__(self, checkpoint: Checkpoint, chunk_bytes: int) -> None:
        self.checkpoint, self.chunk_bytes = checkpoint, chunk_bytes
        state = [kind for kind in checkpoint.kinds() if kind not in (WEIGHT, BUFFER)]
        self.kinds = [kind for kind in (WEIGHT, BUFFER, *state) if kind in checkpoint.kinds()]
        self.sources = {
            dcp_key(name, kind): (name, kind) for kind in self.kinds for name in checkpoint.names(kind)
        }
        self.steps = int(checkpoint.scalars.get(_STEPS, checkpoint.step))
        self.paths: dict[str, tuple[str, ...]] = {k: dcp_path(*source) for k, source in self.sources.items()}
        updated = dict.fromkeys(name for kind in state for name in checkpoint.names(kind))
        self.paths |= {dcp_key(name, "step"): dcp_path(name, "step") for name in updated}
        self.dtypes = {key: checkpoint.dtype(*source) for key, source in self.sources.items()}
        self.bytes = sum(prod(checkpoint.shape(*s)) * self.dtypes[k].itemsize for k, s in self.sources.items())
        self.last: torch.Tensor | None = None

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Everything is known already."""

    def create_local_plan(self) -> SavePlan:
        """The chunks of every tensor."""
        items = [item for key in self.paths for item in self._items(key)]
        return SavePlan(items, planner_data=self.paths)

    def _items(self, key: str) -> Iterator[WriteItem]:
        source = self.sources.get(key)
        shape = self.checkpoint.shape(*source) if source else ()
        dtype = self.dtypes.get(key, torch.float32)
        for i, (offset, size) in enumerate(slabs(shape, max(1, self.chunk_bytes // dtype.itemsize))):
            chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(shape))
            yield WriteItem(index=MetadataIndex(key, offset, i), type=WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch's own, for one rank."""
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=self.paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read a chunk. torch's writer keeps a reference to every tensor that it wrote, so the last is emptied."""
        if self.last is not None:
            self.last.untyped_storage().resize_(0)
        key, data = write_item.index.fqn, write_item.tensor_data
        assert data is not None
        source = self.sources.get(key)
        if source is None:
            self.last = torch.tensor(float(self.steps))
        else:
            # A copy of our own: what a reader returns may lie in memory that cannot be given back early.
            self.last = self.checkpoint.read(*source, tuple(data.chunk.offsets), tuple(data.chunk.sizes)).clone()
        return self.last
