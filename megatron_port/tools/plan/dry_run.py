"""Everything of a run that can be checked without its machine: `train --dry-run`, on a laptop, for any number of ranks.

Every distinct rank of the real layout is built on meta tensors (no memory, no
processes), and the slices of all ranks are checked to cover the model exactly.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import torch

from megatron_port.core.config.checks import check, resolve
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.data.objective import objective_of
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import ParameterRecord, record_of
from megatron_port.core.errors import ConfigError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.core.optim.schedules import BatchSchedule, learning_rate
from megatron_port.ext.corpora.document_length import with_document_length
from megatron_port.ext.memory.sites import layer_choices
from megatron_port.ext.telemetry.flops import counted, document_of, hardware_flops, model_flops
from megatron_port.ext.weights.adapter_spec import adapter_parameters
from megatron_port.run.build import build_model, check_parameter_groups, layers_by_chunk, topology_of
from megatron_port.run.elastic import starved_pipeline
from megatron_port.run.weights import open_initial
from megatron_port.tools.interop.hf_config import another_family
from megatron_port.tools.plan.activation_plan import with_activation_plan
from megatron_port.tools.plan.arithmetic import bubble_fraction
from megatron_port.tools.plan.case import case_of
from megatron_port.tools.plan.guard import memory_problem, planned_memory
from megatron_port.tools.plan.memory import held_bytes

AXES = (
    ("tp", "share each layer"), ("cp", "share the positions of a sequence"), ("dp", "replicas of a slice"),
    ("pp", "stages"),
)
"""Axes and what their ranks are to one another."""


@dataclass(frozen=True)
class StageSummary:
    """Sizes of one stage, the largest over its tp ranks."""

    stage: int
    layers: int
    parameters: int
    """Elements on a rank, padding included."""
    static_bytes: int
    """Weights, gradients, masters and the rule's state on a rank, without activations."""


def _records(config: RunConfig, ctx: ParallelContext) -> list[ParameterRecord]:
    chunks = torch.nn.ModuleList(build_model(config, ctx, torch_providers(), StepSlot(DropoutStream(0, ctx.device))))
    return [record_of(p) for p in chunks.parameters()]


def is_of_experts(record: ParameterRecord) -> bool:
    """Return whether expert-parallel ranks divide the parameter."""
    return any("ep" in shard.axes for shard in record.shards)


def build_every_rank(config: RunConfig, topology: Topology) -> list[StageSummary]:
    """Build each distinct rank; check that the slices cover each parameter once.

    Raises ConfigError naming the first parameter that is not covered (our bug, found before the job is submitted).
    """
    split = layers_by_chunk(config, topology)
    config = replace(config, layout=replace(config.layout, pipeline_split=split))  # balanced once, not once per rank
    case, _ = case_of(config)
    objective = objective_of(config)
    covered: Counter[str] = Counter()
    out = []
    for stage in range(topology.pp):
        largest, trained, experts = 0, 0, 0
        for rank in range(topology.first_rank(pp=stage), topology.first_rank(pp=stage) + max(topology.tp, topology.ep)):
            ctx = ParallelContext(topology, rank, torch.device("meta"), topology.coordinates(rank))
            records = _records(config, ctx)
            for record in records:
                if record.is_owned(ctx.mesh, rank):
                    covered[record.name] += prod(record.extent)
            largest = max(largest, sum(prod(record.local_shape) for record in records))
            trained = max(trained, sum(prod(record.local_shape) for record in records if record.trainable))
            experts = max(experts, sum(prod(record.local_shape) for record in records
                                       if is_of_experts(record) and not objective.is_frozen(record.name)))
        layers = sum(split[topology.virtual_stage(stage, chunk)] for chunk in range(topology.vp))
        out.append(StageSummary(stage, layers, largest, int(sum(held_bytes(case, largest, trained, experts)))))
    adapters = {name: spec.shape for name, spec in adapter_parameters(config.model, config.fine_tuning).items()}
    of_teacher = {} if case.teacher is None else {
        objective.frozen_prefix + name: shape for name, shape in parameter_shapes(case.teacher).items()
    }
    for name, shape in (parameter_shapes(config.model) | adapters | of_teacher).items():
        if covered[name] != prod(shape):
            raise ConfigError(f"{name}: the ranks hold {covered[name]} of its {prod(shape)} elements")
    return out


def every(ranks: tuple[int, ...]) -> str:
    """Return ranks as ``0-7`` or ``0-40 by 8``; groups of a topology are evenly spaced."""
    if len(ranks) == 1:
        return str(ranks[0])
    step = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")


def group_lines(topology: Topology, gpus_per_node: int) -> list[str]:
    """Return a line per axis: how many groups of what size, the first of them, and how many nodes it spans."""
    lines = []
    for axis, what in AXES:
        if axis == "cp" and topology.cp == 1:
            continue
        first = topology.mesh.members(0, topology.mesh.dims(axis))
        size = len(first)
        nodes = len({rank // gpus_per_node for rank in first})
        lines.append(
            f"{axis:>5}  {topology.world_size // size:>6} groups of {size:<4} ({what}); the first: "
            f"ranks {every(first)} on {nodes} node{'s' if nodes > 1 else ''}"
        )
    copies = topology.kv_copies
    if copies > 1:
        lines.append(
            f"{'kv':>5}  {topology.world_size // copies:>6} groups of {copies:<4} (hold the same key/value heads); the "
            f"first: ranks {every(tuple(range(copies)))}"
        )
    return lines


def dry_run(config: RunConfig, world_size: int | None = None, *, all_stages: bool = False) -> str:
    """Check a run for ``world_size`` ranks (None: those of its layout) and return its description.

    ``all_stages``: a line for each, also where many are alike.

    Raises ConfigError, DataError or CheckpointError as training would.
    """
    started = time.perf_counter()
    check(config, world_size=world_size)
    if config.checkpoint.initial_weights:
        open_initial(config).close()
    objective_of(config).check_files()
    config = with_activation_plan(resolve(config, world_size), world_size)
    topology = topology_of(config)
    tp, pp, dp = topology.tp, topology.pp, topology.dp
    schedule = BatchSchedule(config.batch, dp)
    learning_rate(config.optimizer, 0, config.training.steps)
    check_parameter_groups(config)
    build_loaders(
        config, dp_rank=0, dp_size=dp, need_tokens=True, need_labels=True,
        train_samples=schedule.samples_before(config.training.steps),
    )
    stages = build_every_rank(config, topology)
    micro = config.batch.global_batch_size // (config.batch.micro_batch_size * dp)
    document = document_of(with_document_length(config).data)
    needed = model_flops(config.model, config.fine_tuning, document)
    executed = hardware_flops(
        config.model, config.activations.recompute, tp, layer_choices(config.activations, config.model.num_layers),
        config.fine_tuning, document, chunked_head=config.activations.head_chunk > 0,
    )
    lines = [
        f"{config.model.name}: {counted(config.model, config.fine_tuning)}; {topology.sizes()} = "
        f"{topology.world_size} ranks, every distinct one built in {time.perf_counter() - started:.1f} s",
        f"batch {config.batch.global_batch_size} = {config.batch.micro_batch_size} x {micro} micro-batches x {dp} "
        f"replicas; pipeline bubble {bubble_fraction(pp, micro, topology.vp):.1%} of the useful time",
        *(f"warning: {line}" for line in (starved_pipeline(pp, micro), another_family(config.model)) if line),
        f"a step: {needed * config.batch.global_batch_size / 1e15:.4g} model PFLOP, "
        f"{executed * config.batch.global_batch_size / 1e15:.4g} "
        "hardware",
        *group_lines(topology, config.cluster.gpus_per_node),
        "stage  ranks          layers  parameters per rank  weights+gradients+optimizer per rank "
        "(activations not counted)",
    ]
    whole = all_stages or len(stages) <= 8
    for s in stages if whole else [*stages[:4], *stages[-4:]]:
        first = topology.first_rank(pp=s.stage)
        ranks = f"{first}-{first + topology.world_size // pp - 1}"
        lines.append(f"{s.stage:>5}  {ranks:<13}  {s.layers:>6}  {s.parameters:>19,}  {s.static_bytes / 1e9:8.2f} GB")
        if not whole and s.stage == 3:
            between = stages[4:-4]
            layers = sorted({m.layers for m in between})
            most = max(m.static_bytes for m in between) / 1e9
            lines.append(
                f"  ...  {len(between)} stages of {' or '.join(map(str, layers))} layers between, "
                f"at most {most:.2f} GB (--dry-run all lists them)"
            )
    lines += memory_lines(config, stages, topology.world_size)
    return "\n".join(lines)


def memory_lines(config: RunConfig, stages: list[StageSummary], world_size: int) -> list[str]:
    """Return the planner's lines on the fullest rank, with a warning where ``launch.memory_check`` lets it pass.

    Raises ConfigError where the run cannot fit; without a [hardware] section only what is held from the start counts.
    """
    found = memory_problem(config, world_size)
    if found and config.launch.memory_check == "stop":
        raise ConfigError(found)
    planned = planned_memory(config, world_size)
    if planned is not None:
        worst = max(planned[2], key=lambda m: m.total)
        fullest = (
            f"planned: stage {worst.stage} needs {worst.total / 1e9:.1f} of {config.cluster.memory_gb:g} GB "
            f"with activations, at {worst.peak_at}"
        )
        return [fullest, *([f"warning: {found}"] if found else [])]
    most = max(stages, key=lambda s: s.static_bytes)
    limit, t = config.cluster.memory_gb, config.layout
    if limit and most.static_bytes / 1e9 > limit and config.launch.memory_check == "stop":
        raise ConfigError(
            f"stage {most.stage} needs {most.static_bytes / 1e9:.1f} GB for weights, gradients and optimizer alone; "
            f"a device of {config.cluster.name} has {limit:g} GB. Use more stages (pp {t.pipeline_parallel_size}), "
            f"more tensor parallelism (tp {t.tensor_parallel_size}) or more replicas with zero_stage 1 "
            f"(dp {t.data_parallel_size})"
        )
    return []
