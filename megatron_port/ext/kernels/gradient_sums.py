"""Accumulation of gradients by own kernels, small ones together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron_port.core.engine.native_passes import GradientSink
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.ext.kernels.ops.optimizer import add_gradients_, add_rows_, add_slots_

_LARGEST_DEFERRED = 1 << 16
"""Elements of a gradient that may wait for others: of biases and norms; the memory of a table's is to be freed."""
_MOST_WAITING = 32 << 20
"""Bytes of slots that may wait: they are read again from a GPU's cache, which has 40 to 60 MB."""


class _Kept(NamedTuple):
    """A gradient as slots: which of those that a kernel summed together, and whose."""

    slots: torch.Tensor
    row: int
    parameter: torch.Tensor


class SumsTogether(GradientSink):
    """Sink whose small gradients wait until one arrives that is reduced with others, and for the end of the pass.

    The sums are those of each added by itself, to the bit. On a GPU gradients wait as the slots of the kernels that
    made them (``ext/kernels/slots.py``), up to :data:`_MOST_WAITING` bytes. A parameter that is used twice in a pass
    then gets two gradients, each rounded, where autograd would round their sum.
    """

    def __init__(self, sharded: ShardedParameters) -> None:
        super().__init__(sharded, add_rows_)
        self._waiting: list[torch.Tensor] = []
        self._kept: list[_Kept] = []
        self._kept_bytes = 0
        self._bucket: int | None = None

    def hook(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Return the hook that adds what arrives as ``grad`` to a parameter's sum, now or with the next
        :meth:`flush`, and frees it."""
        if parameter.numel() > _LARGEST_DEFERRED:
            return self._add
        if not parameter.is_cpu and parameter.dim() == 1:
            parameter.slot_sums = self  # type: ignore[attr-defined]

        def wait(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # else layers.linear adds it itself
                self._open_bucket_of(parameter)
                self._waiting.append(parameter)

        return wait

    def take(self, slots: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """Keep slots [slots, parameters, cols], float32, until the next :meth:`flush` adds their sums."""
        for row, parameter in enumerate(parameters):
            self._open_bucket_of(parameter)
            self._kept.append(_Kept(slots, row, parameter))
        self._kept_bytes += slots.untyped_storage().nbytes()
        if self._kept_bytes > _MOST_WAITING:
            self.flush()

    def _open_bucket_of(self, parameter: torch.Tensor) -> None:
        """Let those of one bucket alone wait: its reduction is not to wait for another's gradients, and to give memory
        to those of another may take away that of the first."""
        bucket = self._sharded().reduced_with(parameter)
        if bucket != self._bucket:
            self.flush()
            self._bucket = bucket

    @torch.no_grad()
    def flush(self) -> None:
        """Add the gradients that wait to their sums. To be called at the end of every backward pass."""
        kept, self._kept, self._kept_bytes = self._kept, [], 0
        waiting, self._waiting = self._waiting, []
        if not kept and not waiting:
            return
        sharded = self._sharded()
        if kept:
            sums = [sharded.gradient_of(k.parameter) for k in kept]
            add_slots_(sums, [k.slots for k in kept], [k.row for k in kept], kept[0].parameter)
        if waiting:
            add_gradients_([sharded.gradient_of(p) for p in waiting], [p.grad for p in waiting if p.grad is not None])
        for parameter in waiting:
            parameter.grad = None
        for parameter in [*(k.parameter for k in kept), *waiting]:
            sharded.added(parameter)
