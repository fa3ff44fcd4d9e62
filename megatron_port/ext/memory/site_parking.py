"""Where activations wait that are neither kept nor computed again: in host memory, or a part on each of several ranks.

What is moved is memory, not tensors: several views of the same are moved once, and come back together when the first of
them is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_port.core.dist.shares import PartitionedBytes
from megatron_port.core.model.activation_sites import Decision
from megatron_port.ext.memory.site_clock import SiteClock
from megatron_port.ext.memory.swap import SwappedLayer, SwapSpace

SMALL = 256
"""Bytes of memory that is not worth moving."""


class Parked(Protocol):
    """Flat bytes that are elsewhere."""

    def take(self) -> torch.Tensor:
        """Bring them back, once."""


class _Swapped:
    """One tensor of what a layer swapped."""

    def __init__(self, layer: SwappedLayer, number: int) -> None:
        self._layer, self._number = layer, number

    def take(self) -> torch.Tensor:
        return self._layer.take(self._number)


class _Memory:
    """Parked memory, and the views of it that have not been asked for."""

    def __init__(self, parked: Parked) -> None:
        self._parked, self.users = parked, 0
        self._flat: torch.Tensor | None = None

    def take(self) -> torch.UntypedStorage:
        if self._flat is None:
            self._flat = self._parked.take()
        storage = self._flat.untyped_storage()
        self.users -= 1
        if self.users == 0:
            self._flat = None
        return storage


class ParkedTensor:
    """A tensor in parked memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype, self._view = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._memory: _Memory | None = None

    def lies_in(self, memory: _Memory) -> None:
        """Note where it is."""
        self._memory = memory
        memory.users += 1

    def take(self) -> torch.Tensor:
        """Return it, once."""
        assert self._memory is not None
        storage, self._memory = self._memory.take(), None
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._view)


class Lot:
    """Tensors that are to be parked together."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Tensor, list[ParkedTensor]]] = {}

    def add(self, tensor: torch.Tensor) -> ParkedTensor | None:
        """Note a tensor; None: it is too small to be moved."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALL:
            return None
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        parked = ParkedTensor(tensor)
        self._found.setdefault(storage.data_ptr(), (flat, []))[1].append(parked)
        return parked

    def park(self, places: ParkingPlaces, decision: Decision, layer: int) -> None:
        """Offload all tensors; the caller must drop its references."""
        if self._found:
            parked = places.park(decision, layer, [flat for flat, _ in self._found.values()])
            for place, (_, tensors) in zip(parked, self._found.values()):
                memory = _Memory(place)
                for tensor in tensors:
                    tensor.lies_in(memory)
        self._found.clear()


class ParkingPlaces:
    """Where a rank's activations may wait, and who measures them.

    Args:
        swap: None: nothing is swapped.
        group: ranks that hold alike what is partitioned; None: this one is alone, or nothing is alike, and it is kept.
    """

    def __init__(self, swap: SwapSpace | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.swap, self.group = swap, group
        self.clock: SiteClock | None = None
        """Measures the sites of all layers that park here, as long as it is set."""

    def has(self, decision: Decision) -> bool:
        """Return whether there is a place for what is so decided."""
        return (self.swap if decision == "swap" else self.group if decision == "partition" else None) is not None

    def park(self, decision: Decision, layer: int, flats: Sequence[torch.Tensor]) -> list[Parked]:
        """Park flat bytes of a layer, given by its number in the model."""
        if decision == "swap":
            assert self.swap is not None
            swapped = self.swap.swap(layer, flats)
            return [_Swapped(swapped, number) for number in range(len(flats))]
        assert self.group is not None
        return [PartitionedBytes(flat, self.group) for flat in flats]


def is_of_all_layers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is marked as one that all layers share (rotary tables): it is no layer's to park."""
    return getattr(tensor, "of_all_layers", False) or getattr(tensor._base, "of_all_layers", False)


def mark_as_of_all_layers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, marked so."""
    tensor.of_all_layers = True  # type: ignore[attr-defined]
    return tensor
