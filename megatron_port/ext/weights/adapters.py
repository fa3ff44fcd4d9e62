"""The adapters of a stage's linears, built from their specs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from megatron_port.core.dist.buffers import recorded_buffers
from megatron_port.core.dist.positions import SequencePartition
from megatron_port.core.dist.record import record_of
from megatron_port.core.layers.step import StepSlot
from megatron_port.ext.weights.adapter import Adapter, AdapterPart, Drop
from megatron_port.ext.weights.adapter_spec import AdapterSpec, Part, parts_of

if TYPE_CHECKING:
    from megatron_port.core.model.build import BuildContext


def make_adapter(layer: str, spec: AdapterSpec, build: BuildContext) -> Adapter:
    """Build the adapters of a linear of ``layer``."""
    linear, tp = spec.linear, build.ctx.size("tp")
    groups = 1 if linear.groups is None else linear.groups.held(tp) // tp
    parts = [_part(layer, spec, part, build, groups) for part in parts_of(linear)]
    row = linear.parallel == "row"
    return Adapter(
        parts, groups=groups, scale=build.fine_tuning.scale, norm_group=build.ctx.over("tp") if row else None,
        drop_for=partial(_drop_for, build.step, build.partition, build.fine_tuning.dropout,
                         f"{layer}.{linear.name}.lora", linear.inputs,
                         build.ctx.index("tp") * (linear.inputs // tp) if row else 0, linear.parallel == "none"),
    )


def _drop_for(
    step: StepSlot, partition: SequencePartition, p: float, op: str, width: int, offset: int, own: bool,
    rows: int,
) -> Drop | None:
    """Return the dropout of the rows that this rank holds, or of its ``own`` of the residual stream: of their ``width``
    features, those from ``offset`` on."""
    partition = partition.divided(step.division)
    if own:
        positions = partition.residual(partition.seq_length(rows * partition.pieces))
    else:
        positions = partition.held(partition.seq_length(rows))
    return step.stream.repeatable(p, op=op, positions=positions, width=width, offset=offset)


def _part(layer: str, spec: AdapterSpec, part: Part, build: BuildContext, groups: int) -> AdapterPart:
    tp = build.ctx.size("tp")
    rows = part.rows
    if spec.linear.parallel == "column":
        rows = (rows // part.kv_heads * max(part.kv_heads, tp) if part.kv_heads else rows) // tp
    if part not in spec.adapted:
        return AdapterPart(part.name, rows // groups)
    made = [build.divided(p, layer) for p in spec.parameters_of(part)]
    return AdapterPart(part.name, rows // groups, *made)


def freeze_all_but_adapters(modules: Iterable[nn.Module]) -> None:
    """Mark every parameter that belongs to no adapter, and every buffer, as one that updates leave alone."""
    for module in modules:
        trained = {id(p) for m in module.modules() if isinstance(m, Adapter) for p in m.parameters()}
        for p in module.parameters():
            if id(p) not in trained:
                p.record = replace(record_of(p), trainable=False)  # type: ignore[attr-defined]
                p.requires_grad_(False)
        for record, buffer in recorded_buffers(module):
            buffer.record = replace(record, trainable=False)  # type: ignore[attr-defined]
