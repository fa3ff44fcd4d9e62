"""Accumulation of gradients by own kernels, small ones together."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from megatron_port.core.engine.native_passes import GradientSink
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.ext.kernels.differentiable import Parameters
from megatron_port.ext.kernels.ops.optimizer import add_gradients_, add_rows_, add_slots_

_LARGEST_DEFERRED = 1 << 16
"""Elements of a gradient that may wait for others: of biases and norms; the memory of a table's is to be freed."""
_MOST_WAITING = 8 << 20
"""Elements of slots that may wait, 32 MiB: they are read again from a GPU's cache, which has 40 to 60 MB."""


class _SumsOfUses:
    """Destination of slots (``differentiable.SlotSums``) for leaves that are uses of parameters, each named by its
    ``parameter``: they are kept for those."""

    def __init__(self, sums: SumsTogether) -> None:
        self._sums = weakref.ref(sums)

    def take(self, slots: torch.Tensor, uses: Parameters, elements: int) -> None:
        """Keep slots of the parameters that ``uses`` are of."""
        sums = self._sums()
        assert sums is not None, "a backward pass after its engine's end"
        sums.take(slots, tuple(use.parameter for use in uses), elements)  # type: ignore[attr-defined]


class SumsTogether(GradientSink):
    """Sink whose small gradients wait until one arrives that is reduced with others, and for the end of the pass.

    Gradients of biases and norms wait as the slots of the kernels that made them (``differentiable``), up to
    :data:`_MOST_WAITING` elements, and are added without being rounded to the parameter's dtype.
    """

    def __init__(self, sharded: ShardedParameters) -> None:
        super().__init__(sharded, add_rows_)
        self._waiting: list[torch.Tensor] = []
        self._kept: list[tuple[torch.Tensor, int, Parameters]] = []
        """(slots, which of their gradients is the first parameter's, parameters)"""
        self._kept_elements = 0
        self._bucket: int | None = None
        self._uses = _SumsOfUses(self)
        self._turn = 0
        """Number of the next flush. A parameter's ``slot_turn`` is that of the flush its slots were last kept for."""

    def hook(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Return the hook that adds what arrives as ``grad`` to a parameter's sum, now or with the next
        :meth:`flush`, and frees it."""
        if parameter.numel() > _LARGEST_DEFERRED:
            return self._add
        bucket = self._sharded().reduced_with(parameter)
        parameter.slot_bucket, parameter.slot_turn = bucket, -1  # type: ignore[attr-defined]
        if parameter.dim() == 1:
            parameter.slot_sums, parameter.use_sums = self, self._uses  # type: ignore[attr-defined]

        def wait(parameter: torch.Tensor) -> None:
            grad = parameter.grad
            if grad is None:  # layers.linear or the kernel itself has added it
                return
            if grad.dtype != parameter.dtype:  # float32, from an op that sums rows: one slot
                parameter.grad = None
                self._keep_alone(grad.reshape(1, 1, -1), 0, parameter, bucket)
                self._kept_elements += grad.numel()
                return
            if bucket != self._bucket:
                self._turn_to(bucket)
            self._waiting.append(parameter)

        return wait

    def take(self, slots: torch.Tensor, parameters: Parameters, elements: int) -> None:
        """Keep slots [slots, parameters, cols], float32, until the next :meth:`flush` adds their sums. The parameters
        have been given to :meth:`hook`."""
        buckets = [parameter.slot_bucket for parameter in parameters]  # type: ignore[attr-defined]
        together = buckets == buckets[:1] * len(buckets)
        if together:
            if buckets[0] != self._bucket:
                self._turn_to(buckets[0])
            for parameter in parameters:  # marked, not looked up: every kernel's backward pass is here
                together &= parameter.slot_turn != self._turn  # type: ignore[attr-defined]
                parameter.slot_turn = self._turn  # type: ignore[attr-defined]
        if together:
            self._kept.append((slots, 0, parameters))
        else:
            for row, (bucket, parameter) in enumerate(zip(buckets, parameters)):
                self._keep_alone(slots, row, parameter, bucket)
        self._kept_elements += elements
        if self._kept_elements > _MOST_WAITING:
            self.flush()

    def _keep_alone(self, slots: torch.Tensor, row: int, parameter: torch.Tensor, bucket: int) -> None:
        """Keep the slots of one parameter. Blocks of a launch add to its sum without waiting for each other, so a
        launch may have a parameter only once."""
        self._turn_to(bucket)
        if parameter.slot_turn == self._turn:  # type: ignore[attr-defined]
            self.flush()
        parameter.slot_turn = self._turn  # type: ignore[attr-defined]
        self._kept.append((slots, row, (parameter,)))

    def _turn_to(self, bucket: int) -> None:
        """Let gradients of one bucket alone wait: its reduction is not to wait for another's, and to give memory to
        those of another may take away that of the first."""
        if bucket != self._bucket:
            self.flush()
            self._bucket = bucket

    @torch.no_grad()
    def flush(self) -> None:
        """Add the gradients that wait to their sums. To be called at the end of every backward pass."""
        self._turn += 1
        kept, self._kept, self._kept_elements = self._kept, [], 0
        waiting, self._waiting = self._waiting, []
        if not kept and not waiting:
            return
        sharded = self._sharded()
        owners = [parameter for _, _, parameters in kept for parameter in parameters]
        if kept:
            slots = [part for part, _, parameters in kept for _ in parameters]
            rows = [first + i for _, first, parameters in kept for i in range(len(parameters))]
            add_slots_([sharded.gradient_of(parameter) for parameter in owners], slots, rows)
        if waiting:
            add_gradients_([sharded.gradient_of(p) for p in waiting], [p.grad for p in waiting if p.grad is not None])
        for parameter in waiting:
            parameter.grad = None
        for parameter in owners + waiting:
            sharded.added(parameter)
