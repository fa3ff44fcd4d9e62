"""Bytes that a rank hands to collectives and sends in one step, by axis and kind: what a trace of a real step counts.

A buffer is counted whole: the tensor of an all-reduce, the gathered tensor of an all-gather, the tensor that a
reduce-scatter starts from. The seconds of ``plan.layer`` and ``plan.step`` move the same bytes
(tests/unit/test_plan_bytes.py compares all three).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_port.core.dist.mesh import REPLICAS, SHARDED, WORLD, Topology, purposes
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.experts.spec import MoESpec, moe_of
from megatron_port.ext.mixers.recurrent_spec import RecurrentSpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.elements import (
    bucket_elements,
    expert_elements,
    gathered_elements,
    spanning_elements,
    stage_kinds,
    trained_elements,
)
from megatron_port.tools.plan.exchanges import context_bytes, routed
from megatron_port.tools.plan.layer import ends_at_product

Key = tuple[str, str]
"""(axis: tp | kv_copies | cp | dp | dp+cp | dp_shard+cp | dp_replicate | ep | expert_shard | expert_replicate |
expert_tp | pp | embedding | world, kind: all-reduce | all-gather | reduce-scatter | all-to-all | send | broadcast)."""
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
    routing = [(moe, count) for layer, count in stage_kinds(case, stage) if (moe := moe_of(layer)) is not None]
    if case.tp > 1:
        full, with_experts = case.recompute == "full", sum(count for _, count in routing)
        entries, leaving = _region_ends(case, stage)
        # Exits that recompute does not repeat: it has no more to do for a factor behind them.
        skipped = (layers - with_experts) * ends_at_product(case) * full * (not m.down_rank)
        exits = entries + leaving * (1 + full) - skipped
        if case.sequence_parallel:
            # Once more in the backward pass at the entries of a layer's regions and the head's, where inputs are
            # gathered and not results (of the projection that all units of a recurrence share).
            parts = [(part, count) for layer, count in stage_kinds(case, stage) for part in layer.mixer.parts]
            results = sum(count * part.shared_rows for part, count in parts if isinstance(part, RecurrentSpec))
            gathered = entries * (2 + full) + leaving + first + 2 * last - results / m.hidden_size
            out.add("tp", "all-gather", gathered * whole)
            out.add("tp", "reduce-scatter", (exits + first + last) * whole)
        else:
            out.add("tp", "all-reduce", (exits + first + last) * whole)
            joined = 2 + (full and not ends_at_product(case))
            out.add("tp", "all-gather", with_experts * joined * whole)
        for mixer in model_spec(m).layers[0].mixer.parts:  # recurrences are computed again in any case
            passes = (3 if case.recompute == "full" else 2) + mixer.recomputes
            out.add("tp", "all-reduce", layers * mixer.norms_over_ranks * passes * tokens * case.wide)
        if last:  # maximum, and sum with the target's logit, of each token
            out.add("tp", "all-reduce", 3 * tokens * case.wide)
    for moe, count in routing:
        for (axis, kind), size in expert_traffic(case, moe).bytes.items():
            out.add(axis, kind, count * size)
    if case.cp > 1:
        for layer, count in stage_kinds(case, stage):
            for kind, size in context_bytes(case, layer).items():
                out.add("cp", kind, count * size)
    between = whole / case.tp if case.sequence_parallel else whole
    if case.pp > 1:
        ends = [case.grid.virtual_stage(stage, chunk) for chunk in range(case.vp)]
        other = [v + d for v in ends for d in (1, -1) if 0 <= v + d < case.grid.virtual_stages]
        out.add("pp", "send", between * sum(case.grid.holder(v)[0] != stage for v in other))
    return out


def _region_ends(case: Case, stage: int) -> tuple[float, float]:
    """Entries and exits of the stage's regions that tensor-parallel ranks divide (attention, and what every token
    passes behind it), each by its features over those of the residual stream."""
    hidden, entries, leaving = case.model.hidden_size, 0.0, 0.0
    for layer, count in stage_kinds(case, stage):
        for into, out in layer.region_widths(hidden):
            entries, leaving = entries + count * into / hidden, leaving + count * out / hidden
    return entries, leaving


def axis_of(case: Case, *axes: str) -> str:
    """Return the name of the group over a set of axes: that of the first purpose over the same ranks."""
    copies = max(1, case.tp // case.model.kv_heads)
    shape = Topology(
        tp=case.tp, pp=case.pp, dp=case.dp, cp=case.cp, ep=case.ep, shard=case.shard_size, kv_copies=copies
    )
    over = shape.mesh.everything if axes == (WORLD,) else shape.mesh.dims(*axes)
    listed = purposes(shape.mesh, tied_ends=False, reverse=False)
    return next(purpose.name for purpose in listed if purpose.over == over)


def expert_traffic(case: Case, moe: MoESpec) -> Traffic:
    """Forward and backward of one micro-batch through the routed part of a layer: rows and their counts, and what
    tensor- and context-parallel ranks count together. Balanced, and with none dropped."""
    out, again, model = Traffic(), case.recompute == "full", case.model
    if case.ep > 1:
        axis, sizes = axis_of(case, "ep"), routed(case, moe, balanced=True)
        row = model.hidden_size * case.width
        out.add(axis, "all-to-all", (4 + 2 * again) * sizes.sent * row + 8 * moe.num_experts)
    positions = model.seq_length / case.cp  # of whole samples, in as many as tensor- and context-parallel ranks hold
    for axis, ranks, gathered in (("tp", case.tp, positions), ("cp", case.cp, positions * case.cp)):
        if ranks > 1 and model.moe.balance_loss == "sequence":
            out.add(axis, "all-reduce", (1 + again) * 8 * case.micro_batch * moe.num_experts)
        if ranks > 1 and model.moe.capacity_factor:  # experts, scores, and whether they take part
            out.add(axis, "all-gather", gathered * case.micro_batch * moe.top_k * (8 + case.wide + 1))
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
    apart = held["experts"] if case.expert_replicas < replicas else 0  # in buckets of their own
    whole -= apart
    if replicas > 1:
        reduced = max(case.engine.reduce_bytes, case.wide) if case.dtype == "fp64" else case.engine.reduce_bytes
        every = axis_of(case, *REPLICAS)
        out.add(every, "all-reduce", SUMS)
        if shards > 1:
            passes = case.micro_batches if case.shards_sums else 1
            within = axis_of(case, *SHARDED)
            out.add(within, "reduce-scatter", passes * whole * reduced)
            rest = False if apart else None
            of_rest = trained_elements(case, stage) - (expert_elements(case, stage) if apart else 0)
            gathers = gathered_elements(case, stage, experts=rest) / of_rest
            out.add(within, "all-gather", gathers * whole * case.width)
            if case.shard_copies > 1:  # sums of shards, in full width
                out.add(axis_of(case, "dp_replicate"), "all-reduce", whole // shards * case.wide)
        else:
            out.add(every, "all-reduce", whole * reduced)
        if apart:
            _add_experts(out, case, stage, apart, reduced)
    if case.expert_sums > 1 and not apart:
        out.add(axis_of(case, "expert_tp"), "all-reduce", held["experts"] // shards * case.wide)
    if case.model.moe.enabled:
        _add_tallies(out, case)
    if case.tp > 1:  # gradients of shards
        out.add("tp", "all-reduce", held["partial"] // shards * case.wide)
        out.add("tp", "broadcast", SUMS)
        copies = "tp" if case.model.kv_heads == 1 else "kv_copies"  # all tp ranks hold the one head
        out.add(copies, "all-reduce", held["shared"] // shards * case.wide)
    if case.pp > 1:
        out.add("pp", "broadcast", SUMS)
        out.add("embedding", "all-reduce", held["tied"] // shards * case.wide)
        out.add("shared layers", "all-reduce", spanning_elements(case, stage) // shards * case.wide)
    if case.world > 1:
        out.add(axis_of(case, WORLD), "all-reduce", NORM)
    return out


def _add_experts(out: Traffic, case: Case, stage: int, whole: int, reduced: int) -> None:
    """Add the sums and gathers of so many elements of experts, of which there are fewer copies than of the rest."""
    shards, copies = case.expert_shards, case.expert_copies
    if case.shards == 1:
        if case.expert_replicas > 1:
            out.add(axis_of(case, "expert_shard", "expert_replicate"), "all-reduce", whole * reduced)
        return
    if shards > 1:
        axis, passes = axis_of(case, "expert_shard"), case.micro_batches if case.shards_sums else 1
        out.add(axis, "reduce-scatter", passes * whole * reduced)
        gathers = gathered_elements(case, stage, experts=True) / expert_elements(case, stage)
        out.add(axis, "all-gather", gathers * whole * case.width)
    if copies > 1:
        out.add(axis_of(case, "expert_replicate"), "all-reduce", whole // shards * case.wide)


def _add_tallies(out: Traffic, case: Case) -> None:
    """Add the counts of a step that all ranks sum: of each layer the tokens of each expert and those dropped (int64),
    and three sums (float64)."""
    if case.world > 1:
        each = 8 * (case.model.moe.num_experts + 1 + 3)
        out.add(axis_of(case, WORLD), "all-reduce", case.model.num_layers * each)
