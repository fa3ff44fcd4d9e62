"""Gradients that a kernel leaves as partial sums over rows, to be summed with those of other kernels in one launch.

A kernel whose blocks sum the gradient of a norm or a bias over their rows keeps each block's sum in a slot, and a
launch of its own then adds the slots up: 5 in a layer of GPT-2. The last block of the kernel could do it, but alone:
264 slots of two rows of 1,600 columns are 3.4 MB, some 30 µs for one multiprocessor by its share of the cache's
bandwidth. So the slots wait, until one launch sums those of several kernels and adds them to the engine's fp32 sums.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Parameters = tuple[Tensor, ...]
"""Parameters whose gradients one kernel sums, in its order."""


class SlotSums(Protocol):
    """Destination of slots; parameters carry it as ``slot_sums``."""

    def take(self, slots: Tensor, parameters: Parameters, elements: int) -> None:
        """Keep slots [slots, parameters, cols], ``elements`` in all, until their sums are added to those of the
        parameters' gradients."""


Slots = tuple[SlotSums, Parameters]
"""Where a kernel's slots go, and whose they are."""


def slots_of(first: Tensor | None, second: Tensor | None = None, third: Tensor | None = None) -> Slots | None:
    """Return where the slots of these parameters go; None: at least one is no parameter that takes them, so that
    autograd gets its gradient. A parameter that is None is none of the op's. Written for few calls: each op asks."""
    sums: SlotSums | None = getattr(first, "slot_sums", None)
    if sums is None or first is None:
        return None
    if second is None:
        second, third = third, None
    if second is None:
        return sums, (first,)
    alike = getattr(second, "slot_sums", None) is sums
    if third is None:
        return (sums, (first, second)) if alike else None
    alike &= getattr(third, "slot_sums", None) is sums
    return (sums, (first, second, third)) if alike else None


def took(slots: Slots, kept: Tensor) -> bool:
    """Hand over what a kernel kept; return False where that is nothing, because it wrote the gradients."""
    if not (elements := kept.numel()):
        return False
    slots[0].take(kept, slots[1], elements)
    return True
