"""The adapters of a stage's linears, built from their specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_port.core.config.fine_tuning import FineTuningConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.positions import SequencePartition
from megatron_port.core.dist.record import WEIGHT, InitSpec, StateReader, initial_values, record_of
from megatron_port.core.layers.dropout import drop_threshold, keep_mask, keep_scale, op_key
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import LinearSpec
from megatron_port.ext.weights.adapter import Adapter, AdapterPart, Drop
from megatron_port.ext.weights.adapter_spec import (
    MAGNITUDE,
    A,
    AdapterSpec,
    B,
    Part,
    adapter_parameters,
    adapter_spec,
    layer_adapters,
    parts_of,
    rows_of,
)

if TYPE_CHECKING:
    from megatron_port.core.model.build import BuildContext


def make_adapter(layer: str, linear: LinearSpec, build: BuildContext) -> Adapter | None:
    """Build the adapters of a linear of ``layer``; None: it has none."""
    spec, tp = adapter_spec(linear, build.fine_tuning), build.ctx.size("tp")
    if spec is None:
        return None
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
    features, those from ``offset`` on. It drops the same elements whenever it is called; None: nothing is dropped."""
    partition = partition.divided(step.division)
    if own:
        positions = partition.residual(partition.seq_length(rows * partition.pieces))
    else:
        positions = partition.held(partition.seq_length(rows))
    stream = step.stream
    if p == 0.0 or not stream.enabled:
        return None
    keys = stream.sample_keys(p).view(1, -1, 1)

    def drop(x: torch.Tensor) -> torch.Tensor:
        row = positions.index(x.device).view(-1, 1, 1)
        keep = keep_mask(keys, op_key(op), drop_threshold(p), row, width=width, offset=offset, count=x.shape[2])
        return x * keep.to(x.dtype) * keep_scale(p)

    return drop


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


# State readers of a model with adapters: what they begin as, and the weights that they make of the frozen ones.

Box = tuple[int, ...]


def adapters_by_weight(model: ModelConfig, tuning: FineTuningConfig) -> dict[str, tuple[str, AdapterSpec]]:
    """Return (name of the layer, spec of the adapters) by the canonical name of the linear's weight."""
    return {
        f"layers.{i}.{spec.linear.name}.weight": (f"layers.{i}", spec)
        for i, layer in enumerate(model_spec(model).layers) for spec in layer_adapters(layer, tuning)
    }


class InitialAdapters:
    """A reader of adapters before the first step: A drawn from the seed, B zero, and the lengths of the frozen rows.

    Whatever is no adapter's weight comes from ``read``. Lengths are computed of whole rows, so they are alike on every
    layout.
    """

    def __init__(self, model: ModelConfig, tuning: FineTuningConfig, seed: int, read: StateReader) -> None:
        self._read, self._seed = read, seed
        self._specs = adapter_parameters(model, tuning)
        self._rows = {
            f"{layer}.{spec.name_of(part, MAGNITUDE)}": (weight, spec, part)
            for weight, (layer, spec) in adapters_by_weight(model, tuning).items() for part in spec.adapted
        }

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor (``dist.record.StateReader``)."""
        spec = self._specs.get(name)
        if spec is None:
            return self._read(name, kind, offset, shape, out=out)
        if kind == WEIGHT and name in self._rows:
            weight, adapter, part = self._rows[name]
            return torch.cat([
                lengths_of(read_rows(self._read, weight, adapter, at, count))
                for at, _, count in row_runs(adapter, part, offset[0], shape[0])
            ])
        init = InitSpec(spec.init, spec.std) if kind == WEIGHT else InitSpec("zeros")
        return initial_values(
            seed=self._seed, name=name, init=init, shape=spec.shape, offset=offset, extent=shape
        )


class MergedWeights:
    """A reader of the weights of a model without adapters that computes what the adapted one does: W + s B A.

    Args:
        base: of the frozen weights.
        adapters: of the adapters.
    """

    def __init__(
        self, model: ModelConfig, tuning: FineTuningConfig, base: StateReader, adapters: StateReader
    ) -> None:
        self._scale, self._base, self._adapters = tuning.scale, base, adapters
        self._by_weight = adapters_by_weight(model, tuning)

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor (``dist.record.StateReader``)."""
        if kind != WEIGHT or name not in self._by_weight:
            return self._base(name, kind, offset, shape, out=out)
        layer, spec = self._by_weight[name]
        lead, columns = spec.linear.outputs if spec.linear.packed > 1 else 0, (offset[-1], shape[-1])
        parts = [(0, shape[0])] if not lead else [(offset[0] + i, shape[1]) for i in range(shape[0])]
        rows = [
            self._rows(name, layer, spec, which * lead + offset[-2], count, columns) for which, count in parts
        ]
        return torch.cat(rows).view(shape)

    def _rows(
        self, name: str, layer: str, spec: AdapterSpec, first: int, count: int, columns: tuple[int, int]
    ) -> torch.Tensor:
        """Return some columns of the merged rows [first, first + count)."""
        start, width = columns
        weight = read_rows(self._base, name, spec, first, count)
        wide = torch.promote_types(weight.dtype, torch.float32)
        merged = weight.to(wide, copy=True)
        for part in spec.adapted:
            names = [f"{layer}.{spec.name_of(part, kind)}" for kind in (A, B, MAGNITUDE)]
            for ours, theirs, length in _meeting(spec, part, first, count):
                some = merged[ours - first : ours - first + length]
                a = self._adapters(names[0], WEIGHT, (0, 0), (spec.rank, spec.linear.inputs)).to(wide)
                b = self._adapters(names[1], WEIGHT, (theirs, 0), (length, spec.rank)).to(wide)
                some.add_(b @ a, alpha=self._scale)
                if spec.with_magnitude:
                    wanted = self._adapters(names[2], WEIGHT, (theirs,), (length,)).to(wide)
                    some.mul_((wanted / lengths_of(some).to(wide))[:, None])
        return merged.narrow(1, start, width)


def lengths_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the lengths of rows [n, in], float64 [n]."""
    lengths: torch.Tensor = torch.linalg.vector_norm(rows.double(), dim=1)
    return lengths


def _meeting(spec: AdapterSpec, part: Part, first: int, count: int) -> list[tuple[int, int, int]]:
    """Return (row of the weight, row of the part, how many) of a part's rows among [first, first + count)."""
    out = []
    for ours, theirs, length in rows_of(spec.linear, part):
        start, stop = max(first, ours), min(first + count, ours + length)
        if start < stop:
            out.append((start, theirs + start - ours, stop - start))
    return out


def row_runs(spec: AdapterSpec, part: Part, first: int, count: int) -> list[tuple[int, int, int]]:
    """Return (row of the weight, row of the part, how many) of the rows [first, first + count) of a part, in order."""
    out = []
    for ours, theirs, length in rows_of(spec.linear, part):
        start, stop = max(first, theirs), min(first + count, theirs + length)
        if start < stop:
            out.append((ours + start - theirs, start, stop - start))
    return out


def read_rows(read: StateReader, name: str, spec: AdapterSpec, first: int, count: int) -> torch.Tensor:
    """Return rows [first, first + count) of a linear's weight, leading dimensions flattened, [count, in]."""
    linear = spec.linear
    if linear.packed == 1:
        return read(name, WEIGHT, (first, 0), (count, linear.inputs))
    which, row = divmod(first, linear.outputs)  # no run of rows leaves its matrix
    return read(name, WEIGHT, (which, row, 0), (1, count, linear.inputs))[0]


def over_base(base: StateReader, adapters: StateReader, names: Mapping[str, object]) -> StateReader:
    """Return a reader of the tensors ``names`` from ``adapters``, and of all others from ``base``."""

    def read(name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return (adapters if name in names else base)(name, kind, offset, shape, out=out)

    return read
