"""Bytes of a rank by stage: what is held, the peak and when it comes.

Weights, gradients and optimizer come from the engine's own arithmetic
(``Engine``), those of a layer's activations from ``plan.activations``. The
schedule says how many micro-batches are held at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_port.pipeline.schedules import make_schedule, peak_in_flight
from megatron_port.plan.activations import layer_activation_bytes
from megatron_port.plan.case import Case, Machine
from megatron_port.plan.elements import stage_elements, stage_kinds, unit_elements, window_elements
from megatron_port.plan.fp8 import copy_bytes
from megatron_port.registry import SCHEDULES

LOSS_CHUNK = 1 << 22
"""Logits that torch's cross-entropy takes at a time (``backend.cross_entropy``)."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one rank of a stage at its peak."""

    stage: int
    elements: int
    """Parameters that the rank holds."""
    weights: float
    """With their 8-bit copies under precision.fp8."""
    gradients: float
    optimizer: float
    """Masters and moments, this rank's share."""
    activations: float
    """Activations of all micro-batches in flight."""
    working: float
    """Memory of the layer being recomputed or differentiated: activations and the gradients passing through it."""
    logits: float
    buffers: float
    """Gradient buckets, gathered weights, tensors between stages."""
    fragmentation: float
    """Allocated by the framework, lost to holes."""
    reserved: float
    """Driver, libraries, communicators; outside the allocator."""
    in_flight: float
    """Micro-batches whose activations are held at the peak, in units of the whole stage."""
    peak_at: str

    @property
    def static(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """What the framework's allocator counts at the peak (``max_memory_allocated``)."""
        return self.static + self.activations + self.working + self.logits + self.buffers

    @property
    def total(self) -> float:
        """All that has to fit."""
        return self.allocated + self.fragmentation + self.reserved

    def parts(self) -> dict[str, float]:
        """Name → bytes of everything that adds up to ``total``."""
        skip = {"stage", "elements", "in_flight", "peak_at"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}


def in_flight(case: Case, stage: int) -> float:
    """Micro-batches held at once by a stage, as a multiple of its whole activations.

    GPipe: all m. 1F1B: p − stage, at most m. Zero-bubble: p. Interleaved (arXiv 2104.04473): the warm-up of
    (p − stage − 1)·2 + (v − 1)·p chunk passes and one more, each 1/v of the stage; on the first stage 1 + (p − 1)/(p·v)
    of p micro-batches. A plugin's schedule: counted in its lists.
    """
    m, p, v = case.micro_batches, case.pp, case.vp
    if case.schedule in SCHEDULES.added:
        return peak_in_flight(make_schedule(case.schedule, p, m).plans[stage])
    if case.schedule == "gpipe":
        return m
    if case.schedule in ("zb-h1", "zb-v"):
        return min(p, m)
    if v > 1:
        return min((p - stage - 1) * 2 + (v - 1) * p + 1, m * v) / v
    return min(p - stage, m)


def _logits(case: Case) -> float:
    """Bytes of the logits and of what the loss makes of them on a rank of the last stage.

    Other programs keep an fp32 copy; ours writes the gradient over the logits, and torch's ops take
    ``LOSS_CHUNK`` of them at a time.
    """
    elements = case.model.seq_length / case.cp * case.micro_batch * case.padded_vocab / case.tp
    copies = (1 if case.width == case.wide else 2) * case.wide
    made = elements * 4 if case.engine.copies_logits else min(elements, LOSS_CHUNK) * copies
    return elements * case.width + (0.0 if case.kernels == "own" and not case.engine.copies_logits else made)


def sum_elements(case: Case, stage: int) -> int:
    """Gradients of one micro-batch that a rank holds at once under ZeRO-2 (``optim.grad_buffer_pool``): two buckets,
    one filling up while the other is reduced, and those of a tied table."""
    units, table = unit_elements(case, stage)
    largest = max(min(sum(unit), max(case.bucket, *unit)) for unit in units)
    return (2 if sum(map(sum, units)) > largest else 1) * largest + table


def held_bytes(case: Case, elements: int) -> tuple[float, float, float]:
    """Return the bytes of weights, gradient sums and optimizer (masters and the rule's state) that a rank with so many
    parameters holds all through a run; 8-bit copies of weights and, under ZeRO-3, gathered weights are left out."""
    separate = case.width != case.wide  # else the weights are their own masters
    gradient = max(case.engine.gradient_bytes, case.width) if separate else case.wide
    weights = elements * case.width / (case.shards if case.zero_stage == 3 else 1)
    sums = elements * gradient / (case.shards if case.shards_sums else 1)
    return weights, sums, elements * (case.state_tensors + separate) * case.wide / case.shards


def stage_memory(case: Case, machine: Machine, stage: int) -> StageMemory:
    """Bytes of a rank of ``stage`` at its peak."""
    m, e = case.model, case.engine
    n, w = stage_elements(case, stage), case.width
    kinds, held = stage_kinds(case, stage), in_flight(case, stage)
    split_sums = case.shards_sums and case.shards > 1
    weights, gradients, optimizer = held_bytes(case, n)
    if case.zero_stage == 3 and case.shards > 1:
        weights += w * (n if case.reshard == "step" else min(n, window_elements(case, stage)))
    if case.weight_gathers == 1 or case.shards == 1:
        weights += copy_bytes(case, stage)
    tokens = m.seq_length / case.cp * case.micro_batch
    stream = tokens * m.hidden_size * w * (1 / case.tp if case.sequence_parallel else 1)
    kept = [layer_activation_bytes(case, layer=layer) for layer, _ in kinds]
    stage_input = 0.0 if case.recompute == "full" or stage == 0 else stream
    activations = held * (sum(count * one for one, (_, count) in zip(kept, kinds)) + stage_input)
    if stage == 0 and m.hidden_dropout > 0:
        activations += held * stream / w  # the embedding's mask; Korthikanti, section 4.3
    # While a layer runs backward: what recompute brings back, and the gradients of its widest tensors.
    again = 0.0
    if case.recompute != "none":
        again = max(layer_activation_bytes(case, "none", layer) - one for one, (layer, _) in zip(kept, kinds))
    wide_gradient = tokens * w / case.tp * 2 * max(layer.mlp.down.inputs for layer, _ in kinds) + 2 * stream
    logits = 0.0
    if stage == case.grid.last_stage:  # with the final norm's and the head's inputs; those of others in flight wait
        own = tokens * case.padded_vocab / case.tp * w
        logits = _logits(case) + 2 * stream
        activations += (held - 1) * (own + 2 * stream) if case.schedule == "gpipe" else 0.0
    received = stream if case.pp > 1 else 0.0
    bucket = min(e.bucket_bytes, n * 6.0) if case.dp * case.cp > 1 else 0.0
    bucket += sum_elements(case, stage) * case.wide if split_sums else 0.0
    at = "the last warm-up micro-batch's first backward" if held > 1 else "the first backward"
    update = n * e.update_copy_bytes / case.shards  # the update's own fp32 copy of this rank's share of the gradient
    # Logits are gone when the last layer runs backward: the smaller of the two is not there at the peak.
    if again + wide_gradient < logits:
        again, wide_gradient = 0.0, 0.0
    else:
        logits = 0.0
    peak_passes = activations + again + wide_gradient + logits + received
    if update > peak_passes:
        at = "the optimizer step"
        activations, again, wide_gradient, logits, received = 0.0, update, 0.0, 0.0, 0.0
    allocated = weights + gradients + optimizer + activations + again + wide_gradient + logits + received + bucket
    return StageMemory(
        stage=stage, elements=n, weights=weights, gradients=gradients, optimizer=optimizer, activations=activations,
        working=again + wide_gradient, logits=logits, buffers=received + bucket,
        fragmentation=allocated * machine.hardware.fragmentation, reserved=machine.hardware.reserved_gb * 1e9,
        in_flight=held, peak_at=at,
    )


def plan_memory(case: Case, machine: Machine) -> list[StageMemory]:
    """Every stage, first to last."""
    return [stage_memory(case, machine, stage) for stage in range(case.pp)]
