"""Gradients that a kernel leaves as partial sums over rows, to be summed with those of other kernels in one launch.

A kernel whose blocks sum the gradient of a norm or a bias over their rows keeps each block's sum in a slot, and a
launch of its own then adds the slots up: 5 in a layer of GPT-2. The last block of the kernel could do it, but alone:
264 slots of two rows of 1,600 columns are 3.4 MB, some 30 µs for one multiprocessor by its share of the cache's
bandwidth. So the slots wait, until one launch sums those of several kernels and adds them to the engine's fp32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class SlotSums(Protocol):
    """Destination of slots; parameters carry it as ``slot_sums``."""

    def take(self, slots: Tensor, parameters: Sequence[Tensor]) -> None:
        """Keep slots [slots, parameters, cols] until their sums are added to those of the parameters' gradients."""


class Slots(NamedTuple):
    """Parameters whose gradients one kernel sums, in its order, and where its slots go."""

    sums: SlotSums
    parameters: tuple[Tensor, ...]

    def take(self, slots: Tensor) -> bool:
        """Hand over what the kernel left; return False where it left nothing, because it wrote the gradients."""
        if not slots.numel():
            return False
        self.sums.take(slots, self.parameters)
        return True


def slots_of(*parameters: Tensor | None) -> Slots | None:
    """Return where the slots of these parameters go; None: at least one is no parameter that takes them, so that
    autograd gets its gradient. ``None`` among the parameters: the op has none there."""
    given = tuple(p for p in parameters if p is not None)
    sums = getattr(given[0], "slot_sums", None) if given else None
    if sums is None or any(getattr(p, "slot_sums", None) is not sums for p in given):
        return None
    return Slots(sums, given)
