"""Bytes that a rank hands to collectives and sends in one step, by axis and kind: what a trace of a real step counts.

A buffer is counted whole: the tensor of an all-reduce, the gathered tensor of an all-gather, the tensor that a
reduce-scatter starts from. The seconds of ``plan.layer`` and ``plan.step`` move the same bytes
(tests/unit/test_plan_bytes.py compares all three).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_port.model.decoder_spec import model_spec
from megatron_port.plan.case import Case
from megatron_port.plan.elements import bucket_elements, gathered_elements, trained_elements
from megatron_port.plan.layer import ends_at_product

Key = tuple[str, str]
"""(axis: tp | kv_copies | dp | dp_shard+cp | dp_replicate | pp | embedding | world,
kind: all-reduce | all-gather | reduce-scatter | send | broadcast)."""
SUMS = 16
"""Bytes of the loss and its tokens, shared once per step (two float64)."""
NORM = 8
"""Bytes of the squared gradient norm (float64)."""


@dataclass
class Traffic:
    """Bytes by axis and kind."""

    bytes: dict[Key, float] = field(default_factory=dict)

    def add(self, axis: str, kind: str, size: float) -> None:
        """Count a buffer; empty ones and groups of one rank are left out by the caller."""
        if size:
            self.bytes[(axis, kind)] = self.bytes.get((axis, kind), 0.0) + size

    def of(self, axis: str) -> float:
        """All kinds of an axis."""
        return sum(size for (a, _), size in self.bytes.items() if a == axis)


def pass_traffic(case: Case, stage: int) -> Traffic:
    """Forward and backward of one micro-batch on a rank of ``stage``: tensor parallelism and the pipeline."""
    out, m = Traffic(), case.model
    tokens = m.seq_length / case.cp * case.micro_batch
    whole = tokens * m.hidden_size * case.width
    first, last = stage == 0, stage == case.grid.last_stage
    layers = case.stage_layers(stage)
    if case.tp > 1:
        again = 0 if case.recompute != "full" else 1 if ends_at_product(case) else 2  # exits that recompute repeats
        if case.sequence_parallel:
            entries = 2 if case.recompute == "full" else 0
            again_in = int(case.engine.gathers_again)  # at the entries of a layer's two regions and the head's
            gathered = layers * (4 + entries + 2 * again_in) + first + last * (1 + again_in)
            scattered = layers * (4 + again) + first + last
            out.add("tp", "all-gather", gathered * whole)
            out.add("tp", "reduce-scatter", scattered * whole)
        else:
            out.add("tp", "all-reduce", (layers * (4 + again) + first + last) * whole)
        over_heads = model_spec(m).layers[0].attention.norms_over_ranks
        passes = 3 if case.recompute == "full" else 2
        out.add("tp", "all-reduce", layers * over_heads * passes * tokens * case.wide)
        if last:  # maximum, and sum with the target's logit, of each token
            out.add("tp", "all-reduce", 3 * tokens * case.wide)
    between = whole / case.tp if case.sequence_parallel else whole
    if case.pp > 1:
        ends = [case.grid.virtual_stage(stage, chunk) for chunk in range(case.vp)]
        other = [v + d for v in ends for d in (1, -1) if 0 <= v + d < case.grid.virtual_stages]
        out.add("pp", "send", between * sum(case.grid.holder(v)[0] != stage for v in other))
    return out


def step_traffic(case: Case, stage: int, elements: dict[str, int] | None = None) -> Traffic:
    """A whole step of engine ``native`` on a rank of ``stage``: its passes, gradients, weights, norm and loss.

    ``elements``: of its buckets, by kind, padding included; None: ``bucket_elements``.
    """
    out, once = Traffic(), pass_traffic(case, stage)
    for (axis, kind), size in once.bytes.items():
        out.add(axis, kind, case.micro_batches * size)
    held = bucket_elements(case, stage) if elements is None else elements
    whole, replicas, shards = sum(held.values()), case.dp * case.cp, case.shards
    if replicas > 1:
        reduced = max(case.engine.reduce_bytes, case.wide) if case.dtype == "fp64" else case.engine.reduce_bytes
        out.add("dp", "all-reduce", SUMS)
        if shards > 1:
            passes = case.micro_batches if case.shards_sums else 1
            within = "dp" if case.shard_copies == 1 else "dp_shard+cp"
            out.add(within, "reduce-scatter", passes * whole * reduced)
            gathers = gathered_elements(case, stage) / trained_elements(case, stage)
            out.add(within, "all-gather", gathers * whole * case.width)
            if case.shard_copies > 1:  # sums of shards, in full width
                out.add("dp_replicate", "all-reduce", whole // shards * case.wide)
        else:
            out.add("dp", "all-reduce", whole * reduced)
    if case.tp > 1:  # gradients of shards
        out.add("tp", "all-reduce", held["partial"] // shards * case.wide)
        out.add("tp", "broadcast", SUMS)
        copies = "tp" if case.model.kv_heads == 1 else "kv_copies"  # all tp ranks hold the one head
        out.add(copies, "all-reduce", held["shared"] // shards * case.wide)
    if case.pp > 1:
        out.add("pp", "broadcast", SUMS)
        out.add("embedding", "all-reduce", held["tied"] // shards * case.wide)
    axes = [axis for axis, size in (("tp", case.tp), ("dp", replicas), ("pp", case.pp)) if size > 1]
    if axes:
        out.add(axes[0] if len(axes) == 1 else "world", "all-reduce", NORM)
    return out
