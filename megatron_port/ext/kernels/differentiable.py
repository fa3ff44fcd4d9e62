"""The package's own ops with gradients that cost less per call than those in torch's registry.

A registered gradient (``torch.library.register_autograd``) passes every call through the dispatcher's Python fallback:
38 against 14 µs forward, 143 against 85 forward and back for bias + GeLU of 32 elements (2-core AMD EPYC, torch 2.13).
Eager code takes the function made here; torch.compile and opcheck see the registered op, with the same two functions
behind it. No gradient of a gradient: asking for one is an error, since the kernels of a backward pass have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_port.core.layers.fused import FirstOrderFunction, first_order

Save = Callable[[Any, tuple[Any, ...], Any], None]
"""``setup_context`` of ``register_autograd``: (ctx, inputs, output)."""


def differentiable(name: str, save: Save, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.ops.megatron_port.NAME`` with this gradient; it takes all arguments, by position."""
    class Direct(FirstOrderFunction):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = getattr(torch.ops.megatron_port, name).default(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        @first_order
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return getattr(torch.ops.megatron_port, name)(*inputs)
        return Direct.apply(*inputs)

    Direct.__name__ = Direct.__qualname__ = name
    return call


# Gradients that a kernel leaves as partial sums over rows, to be summed with those of other kernels in one launch.
#
# A kernel whose blocks sum the gradient of a norm or a bias over their rows keeps each block's sum in a slot, and a
# launch of its own then adds the slots up: 5 in a layer of GPT-2. The last block of the kernel could do it, but alone:
# 264 slots of two rows of 1,600 columns are 3.4 MB, some 30 µs for one multiprocessor by its share of the cache's
# bandwidth. So the slots wait, until one launch sums those of several kernels and adds them to the engine's fp32 sums.

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
    autograd gets its gradient. A parameter that is None is none of the op's. Each op asks, so this makes few calls."""
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
