"""A run recorded for comparison: losses, gradient norms, every gradient by name, the weights after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.api import Engine

Slice = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]
"""(canonical name, global shape, offset, this rank's logical slice on the CPU)"""


@dataclass
class RankTrace:
    """Record of one rank. ``copies`` holds replicated and tied tensors of every rank, for bit-equality."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    eval_loss: float | None = None
    final_eval_loss: float | None = None
    gradients: list[list[Slice]] = field(default_factory=list)
    weights: list[Slice] = field(default_factory=list)
    copies: list[Slice] = field(default_factory=list)


def _slices(pairs: Iterable[tuple[ParameterRecord, torch.Tensor]]) -> list[Slice]:
    return [
        (r.name, r.shape, r.offset, r.local_view(t.detach()).to("cpu", torch.float64).clone()) for r, t in pairs
    ]


def record_run(
    engine: Engine,
    ctx: ParallelContext,
    batches: Callable[[int], Sequence[MicroBatch]],
    *,
    steps: int,
    lr: Callable[[int], float],
    evaluate: bool = False,
    evaluate_after: bool = False,
    gradient_steps: int = 1,
) -> RankTrace:
    """Train ``steps`` steps and keep what a comparison needs.

    ``batches(step)``: this replica's micro-batches. Gradients of the first ``gradient_steps`` steps that are not
    skipped (fp16) are kept by the ranks whose copy counts (dp rank 0, one of the replicated copies), unclipped.
    """
    trace = RankTrace()

    def on_gradients(grads: list[tuple[ParameterRecord, torch.Tensor]]) -> None:
        trace.gradients.append(_slices((r, g) for r, g in grads if r.is_owned(ctx.mesh, ctx.rank)))

    if evaluate:
        # From the initial state: after training in half precision it would measure how steps amplify rounding.
        trace.eval_loss = engine.eval_step(batches(0)).loss
    for step in range(steps):
        recorded = len(trace.gradients)
        engine.on_gradients = on_gradients if recorded < gradient_steps else None  # type: ignore[attr-defined]
        result = engine.train_step(batches(step), step=step, lr=lr(step))
        if result.grad_norm is None:
            del trace.gradients[recorded:]
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
    engine.on_gradients = None  # type: ignore[attr-defined]
    if evaluate_after:
        with engine.evaluated_weights():
            trace.final_eval_loss = engine.eval_step(batches(0)).loss
    for record, parameter in engine.named_parameters():
        # Apart, because a file of tensors may not hold the same memory twice.
        trace.copies += _slices([(record, parameter)])
        trace.weights += _slices([(record, parameter)] if record.is_owned(ctx.mesh, ctx.rank) else [])
    return trace


def assemble(traces: Sequence[Sequence[Slice]]) -> dict[str, torch.Tensor]:
    """Return tensors by name, assembled from the ranks' slices.

    Raises ValueError when an element is missing or given twice.
    """
    whole: dict[str, torch.Tensor] = {}
    count: dict[str, torch.Tensor] = {}
    for slices in traces:
        for name, shape, offset, tensor in slices:
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=torch.float64)
                count[name] = torch.zeros(shape, dtype=torch.int32)
            box = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape))
            whole[name][box] = tensor
            count[name][box] += 1
    for name, n in count.items():
        if not bool((n == 1).all()):
            raise ValueError(f"{name}: {int((n == 0).sum())} elements missing, {int((n > 1).sum())} given twice")
    return whole


def differing_copies(traces: Sequence[RankTrace]) -> list[str]:
    """Return the parameters of which two ranks hold different bits for the same element."""
    seen: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    bad = []
    for trace in traces:
        for name, shape, offset, tensor in trace.copies:
            if name not in seen:
                seen[name] = torch.zeros(shape, dtype=torch.float64)
                known[name] = torch.zeros(shape, dtype=torch.bool)
            box = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape))
            overlap = known[name][box]
            if bool((overlap & (seen[name][box] != tensor)).any()):
                bad.append(name)
            seen[name][box] = tensor
            known[name][box] = True
    return sorted(set(bad))
