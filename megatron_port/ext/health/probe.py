"""Where does a step go wrong? What a rank collects while a step is run once more, and never otherwise.

Everything stays on the device until the replay is over: the schedule is the step's own, with no synchronisation added,
so that pipeline stages do not wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from megatron_port.core.dist.record import ParameterRecord

NOWHERE = 1 << 62
"""Order of a finding that found nothing: after every other."""
_STAGES, _MODULES = 1 << 12, 1 << 20


@dataclass
class StepDiagnostics:
    """Diagnostics of a step, as one rank saw it."""

    micro_batch: int | None = None
    """Index on this replica of the first micro-batch with a number that is not finite; None: there is none."""
    phase: str = ""
    """forward | loss | backward: where in that micro-batch."""
    module: str = ""
    """The first module whose output is not finite (forward)."""
    order: int = NOWHERE
    """Comparable between ranks: the smallest is where it began."""
    losses: list[float] = field(default_factory=list)
    """Sum of token losses of each micro-batch (last stage; empty elsewhere)."""
    nonfinite_gradients: list[str] = field(default_factory=list)
    """Parameters whose gradient, on this rank and before any sum over ranks, is not finite."""
    gradient_norm: float = 0.0
    """L2 norm of this rank's own gradients before any sum over ranks, loss scale included."""
    largest_gradients: list[tuple[str, float]] = field(default_factory=list)
    """(parameter, norm of its own gradient), largest first."""


def _finite(value: Any) -> torch.Tensor | None:
    """Boolean scalar on the device: all elements of a floating tensor (or of several) are finite. None: no tensor."""
    if isinstance(value, torch.Tensor):
        return torch.isfinite(value.detach()).all() if value.is_floating_point() else None
    if isinstance(value, (tuple, list)):
        flags = [f for f in map(_finite, value) if f is not None]
        return torch.stack(flags).all() if flags else None
    return None


class Probe:
    """Collector on one rank; an engine calls it around each pass of each micro-batch.

    Args:
        stage: pipeline coordinate of this rank, ``stages`` of them; a rank that holds several chunks of the model
            says at each pass which of the virtual stages it is.
    """

    def __init__(self, *, stage: int, stages: int) -> None:
        self.stage, self.stages = stage, stages
        self._current: tuple[int, int] | None = None
        self._seen = 0
        self._modules: list[tuple[tuple[int, int], int, str, torch.Tensor]] = []
        self._losses: dict[int, torch.Tensor] = {}
        self._backward: dict[tuple[int, int], torch.Tensor] = {}
        self._gradients: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Look at the output of every submodule while the block runs."""
        handles = []
        names: dict[str, str] = {}
        for local, m in module.named_modules():
            parent, _, last = local.rpartition(".")
            own = getattr(m, "name", None)  # a layer's number in the model, where the stage's own differs
            names[local] = own if isinstance(own, str) else ".".join(filter(None, (names.get(parent), last)))
            handles.append(m.register_forward_hook(self._hook(names[local] or "stage")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._current is None:
                return  # a forward pass that recomputes, in backward
            flag = _finite(output)
            self._seen += 1
            if flag is not None:
                self._modules.append((self._current, self._seen, name, flag))

        return hook

    @contextmanager
    def forward(self, micro_batch: int, virtual: int | None = None) -> Iterator[None]:
        """Watch the forward pass of a micro-batch, which runs in the body."""
        self._current, self._seen = (micro_batch, self.stage if virtual is None else virtual), 0
        try:
            yield
        finally:
            self._current = None

    def loss(self, micro_batch: int, loss_sum: torch.Tensor) -> None:
        """Take the sum of token losses of a micro-batch (last stage)."""
        self._losses[micro_batch] = loss_sum.detach()

    @torch.no_grad()
    def after_backward(
        self, micro_batch: int, gradients: Sequence[torch.Tensor | None], virtual: int | None = None
    ) -> None:
        """Take the sums that parameters hold after this micro-batch, and what goes to the stage before."""
        held = [g for g in gradients if g is not None]
        if held:
            place = self.stage if virtual is None else virtual
            self._backward[micro_batch, place] = torch.isfinite(get_total_norm(held, norm_type=math.inf))

    @torch.no_grad()
    def local_gradients(self, gradients: Sequence[tuple[ParameterRecord, torch.Tensor]]) -> None:
        """Take this rank's gradients over all micro-batches, before any sum over ranks."""
        self._gradients = [(r.name, torch.isfinite(g).all(), g.float().norm()) for r, g in gradients]

    def _order(self, micro_batch: int, phase: int, place: int, inside: int) -> int:
        return ((micro_batch * 2 + phase) * _STAGES + place) * _MODULES + min(inside, _MODULES - 1)

    def diagnostics(self, micro_batches: int) -> StepDiagnostics:
        """Return what was collected, read back from the device."""
        found = StepDiagnostics(losses=[float(self._losses[m]) for m in range(micro_batches) if m in self._losses])
        self._find_first(found)
        norms = [(name, float(norm)) for name, _, norm in self._gradients]
        found.nonfinite_gradients = [name for name, finite, _ in self._gradients if not bool(finite)]
        found.gradient_norm = math.sqrt(sum(n * n for _, n in norms)) if norms else 0.0
        rank = sorted(norms, key=lambda pair: -pair[1] if math.isfinite(pair[1]) else -math.inf)
        found.largest_gradients = rank[:8]
        return found

    def _find_first(self, found: StepDiagnostics) -> None:
        def take(order: int, micro_batch: int, phase: str, module: str = "") -> None:
            if order < found.order:
                found.order, found.micro_batch, found.phase, found.module = order, micro_batch, phase, module

        if self._modules:
            flags = torch.stack([f for *_, f in self._modules]).tolist()
            for ((m, place), seen, name, _), good in zip(self._modules, flags):
                if not good:
                    take(self._order(m, 0, place, seen), m, "forward", name)
        for m, loss in self._losses.items():
            if not math.isfinite(float(loss)):
                take(self._order(m, 0, self.stages - 1, _MODULES - 1), m, "loss")
        for (m, place), flag in self._backward.items():
            if not bool(flag):
                # Backward begins at the last stage.
                take(self._order(m, 1, self.stages - 1 - place, 0), m, "backward")


def trace_diagnostics(
    losses: Sequence[torch.Tensor], nonfinite_gradients: Sequence[str], *, stage: int
) -> StepDiagnostics:
    """Return diagnostics of a step that no probe watched: its micro-batches' losses, and gradients summed already.

    A loss that is not finite says more than a gradient, which all replicas share.
    """
    found = StepDiagnostics(losses=[float(x) for x in losses], nonfinite_gradients=list(nonfinite_gradients))
    bad = [m for m, value in enumerate(found.losses) if not math.isfinite(value)]
    if bad:
        found.micro_batch, found.phase, found.order = bad[0], "loss", bad[0]
    elif nonfinite_gradients:
        found.phase, found.order = "sum", NOWHERE - 1 - stage
    return found
