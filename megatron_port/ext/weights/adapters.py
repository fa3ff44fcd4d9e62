"""The adapters of a stage's linears, built from their specs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.collectives import (
    Group,
    all_gather_first,
    recorded_buffers,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron_port.core.dist.positions import SequencePartition
from megatron_port.core.dist.record import WEIGHT, InitSpec, StateReader, initial_values, record_of
from megatron_port.core.layers import fused
from megatron_port.core.layers.dropout import drop_threshold, keep_mask, keep_scale, op_key
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.core.layers.linear import LinearKernels, add_product
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import LinearSpec
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


# Low-rank adapters beside a linear's frozen weight: y = x Wᵀ + s (x Aᵀ) Bᵀ + b (Hu et al., arXiv 2106.09685).
#
# Both products stay on their rank. A column-parallel linear has A whole and its own rows of B; each rank's gradient
# of A comes from its own outputs, and dx of both products leaves in one collective. A row-parallel linear has its own
# columns of A and B whole; x Aᵀ is then a part of a sum, and what B makes of it is summed with the linear's own
# output.
#
# Under DoRA (Liu et al., arXiv 2402.09353) the rows of W + s B A are scaled to trained lengths; as there (section 4.3),
# their present lengths are constants for the gradient.
#
# Where parameters have a ``wgrad_accumulator`` (``layers.linear``), gradients are added to its sums, as those of
# other matrices are: a sum over a micro-batch's tokens in fp16 overflows by how many tokens a micro-batch has.

Drop = Callable[[torch.Tensor], torch.Tensor]
"""Dropout of [rows, batch, features] that drops the same elements each time."""


class _Adapted(FirstOrderFunction):
    """x Wᵀ + s (drop(x) Aᵀ) Bᵀ + b, at the entry of a tensor-parallel region where there is a ``group``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float,
        drop: Drop | None, group: Group, sequence: bool, kernels: LinearKernels, places: Sequence[_Place],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """``places``: where the gradients of A and B are added; none: they are returned."""
        whole = all_gather_first(x, group) if sequence else x
        weights_2d = [w.flatten(0, -2) for w in weights]
        sizes = [w.shape[0] for w in weights_2d]
        biases = [None] * len(weights) if bias is None else bias.split(sizes)
        results = [kernels.forward(whole, w, w_2d, part)[0] for w, w_2d, part in zip(weights, weights_2d, biases)]
        y = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        low = fused.linear(whole if drop is None else drop(whole), a)
        y.add_(fused.linear(low, b), alpha=scale)
        ctx.save_for_backward(x, low, a, b, *weights)
        # The weights are also kept as they are: a saved tensor may be unpacked without the parameter's attributes.
        ctx.weights, ctx.sizes, ctx.scale, ctx.drop, ctx.places = weights, sizes, scale, drop, places
        ctx.group, ctx.sequence, ctx.kernels = group, sequence, kernels
        ctx.bias = bias
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, low, a, b, *weights = ctx.saved_tensors
        grad_2d, low_2d = grad.flatten(0, -2), low.flatten(0, -2)
        gathered = start_all_gather(x, ctx.group) if ctx.sequence else None
        d_low = fused.product(grad_2d, b).mul_(ctx.scale)
        dx = _start_dx(ctx, grad, d_low, a, weights) if ctx.needs_input_grad[0] else None
        da = db = None
        for place in ctx.places:
            place.add_b(grad_2d, low_2d, ctx.scale)
        if not ctx.places:
            db = fused.product(grad_2d.t(), low_2d).mul_(ctx.scale)
        whole = x.detach() if gathered is None else gathered.take()
        read_2d = (whole if ctx.drop is None else ctx.drop(whole)).flatten(0, -2)
        for place in ctx.places:
            place.add_a(d_low, read_2d)
        if not ctx.places:
            da = fused.product(d_low.t(), read_2d)
        d_bias = grad_2d.sum(dim=0, dtype=fused.gradient_dtype(ctx.bias)) if ctx.needs_input_grad[1] else None
        return (None if dx is None else dx.take(), d_bias, da, db, *[None] * (6 + len(weights)))


def _start_dx(ctx: Any, grad: torch.Tensor, d_low: torch.Tensor, a: torch.Tensor, weights: list[torch.Tensor]) -> Any:
    """Start summing the input's gradient over the group: of the weights' products and of the adapter's."""
    shape = (*grad.shape[:-1], a.shape[1])
    dx = fused.product(d_low, a).view(shape)
    if ctx.drop is not None:
        dx = ctx.drop(dx)
    dx_2d = dx.flatten(0, -2)
    for part, weight, matrix in zip(grad.flatten(0, -2).split(ctx.sizes, dim=1), ctx.weights, weights):
        for_dgrad, _ = ctx.kernels.prepare_grad_output(part.contiguous())
        dx_2d.add_(ctx.kernels.dgrad(for_dgrad, weight, matrix.flatten(0, -2)))
    return (start_reduce_scatter if ctx.sequence else start_all_reduce)(dx, ctx.group)


@dataclass(frozen=True)
class AdapterPart:
    """This rank's rows of one matrix that is in the weight, and their adapter.

    ``rows``: of each group of rows; ``a`` [r, in], ``b`` [out, r], ``magnitude`` [out] (DoRA): None where there is
    none.
    """

    name: str
    rows: int
    a: nn.Parameter | None = None
    b: nn.Parameter | None = None
    magnitude: nn.Parameter | None = None


def _accumulates(parameter: nn.Parameter | None) -> bool:
    """Return whether an engine takes the gradient of a parameter as it arises."""
    return parameter is not None and parameter.requires_grad and hasattr(parameter, "wgrad_accumulator")


@dataclass(frozen=True)
class _Place:
    """Where one part's A and B are in those of all parts (:meth:`Adapter.matrices`)."""

    part: AdapterPart
    ranks: slice
    """Rows of A, columns of B."""
    rows: slice
    """In each group of rows of B."""
    groups: int

    def add_b(self, grad_2d: torch.Tensor, low_2d: torch.Tensor, scale: float) -> None:
        """Add the gradient of B: of outputs [tokens, out] and what they were made of [tokens, Σ r]."""
        mine = grad_2d.reshape(len(grad_2d), self.groups, -1)[:, :, self.rows].flatten(1)
        b: Any = self.part.b
        b.wgrad_accumulator.add(b, add_product, mine, low_2d[:, self.ranks], overwrites=True, scale=scale)

    def add_a(self, d_low: torch.Tensor, read_2d: torch.Tensor) -> None:
        """Add the gradient of A: of x Aᵀ [tokens, Σ r] and x [tokens, in]."""
        a: Any = self.part.a
        a.wgrad_accumulator.add(a, add_product, d_low[:, self.ranks], read_2d, overwrites=True)


class _Scaled(FirstOrderFunction):
    """y times a factor for each of its columns, length / ``lengths``; gradients of the lengths are summed wide and
    added to the sums of the ``parts``. ``magnitudes``: those of the parts, to be part of the graph."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, factors: torch.Tensor, lengths: torch.Tensor, parts: Sequence[AdapterPart],
        groups: int, *magnitudes: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(y, factors, lengths)
        ctx.parts, ctx.groups = parts, groups
        return y * factors

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, factors, lengths = ctx.saved_tensors
        wide = torch.promote_types(y.dtype, torch.float32)
        d_lengths = torch.einsum("to,to->o", grad.flatten(0, -2).to(wide), y.flatten(0, -2).to(wide)) / lengths
        by_part = d_lengths.view(ctx.groups, -1).split([part.rows for part in ctx.parts], dim=1)
        for part, found in zip(ctx.parts, by_part):
            if part.magnitude is not None:
                magnitude: Any = part.magnitude
                magnitude.wgrad_accumulator.add(magnitude, _add_flat, found)
        return (grad * factors, *[None] * (4 + sum(part.magnitude is not None for part in ctx.parts)))


def _add_flat(main_grad: torch.Tensor, gradient: torch.Tensor) -> None:
    main_grad.view(-1).add_(gradient.reshape(-1))


class Adapter(nn.Module):
    """The adapters of one linear, whose rows are ``groups`` times those of its ``parts``, in order.

    Args:
        scale: s.
        drop_for: the dropout of an input of so many rows in this pass; None: nothing is dropped.
        norm_group: ranks that hold other columns of the weight (DoRA); None: no other rank does.
    """

    def __init__(
        self, parts: Sequence[AdapterPart], *, groups: int, scale: float, drop_for: Callable[[int], Drop | None],
        norm_group: Group = None,
    ) -> None:
        super().__init__()
        self.parts, self.groups, self.scale, self.drop_for = tuple(parts), groups, scale, drop_for
        self.norm_group = norm_group
        for part in parts:
            for kind in ("a", "b", "magnitude"):
                if getattr(part, kind) is not None:
                    self.register_parameter(f"{part.name}_{kind}", getattr(part, kind))
        self.scales_rows = any(part.magnitude is not None for part in parts)

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of all parts as one pair: A's one below the other, [Σ r, in]; B's beside one another in the
        rows of their parts, zero elsewhere, [out, Σ r]."""
        pairs = [(part.a, part.b) for part in self.parts if part.a is not None and part.b is not None]
        if len(self.parts) == 1:
            return pairs[0]
        a = torch.cat([a for a, _ in pairs])
        rank, total, before = pairs[0][0].shape[0], a.shape[0], 0
        blocks = []
        for part in self.parts:
            if part.b is None:
                blocks.append(a.new_zeros(self.groups, part.rows, total))
                continue
            blocks.append(F.pad(part.b.view(self.groups, part.rows, rank), (before, total - before - rank)))
            before += rank
        return a, torch.cat(blocks, dim=1).flatten(0, 1)

    def forward(
        self, x: torch.Tensor, weights: tuple[torch.Tensor, ...], bias: torch.Tensor | None, *, group: Group,
        sequence: bool, kernels: LinearKernels,
    ) -> torch.Tensor:
        """Return the adapted product of x [seq(/tp), batch, in] with ``weights`` [..., in], whose rows follow one
        another; on a row-parallel linear this rank's part of the sum."""
        a, b = self.matrices()
        rows = x.shape[0] * (dist.get_world_size(group) if sequence and group is not None else 1)
        late = bias if self.scales_rows else None
        y: torch.Tensor = _Adapted.apply(
            x, None if self.scales_rows else bias, a, b, self.scale, self.drop_for(rows), group,
            sequence and group is not None, kernels, list(self._places()), *weights,
        )
        if self.scales_rows:
            y = self._scaled(y, weights, a, b)
        return y if late is None else y + late

    def _places(self) -> Iterator[_Place]:
        """Yield where to add the gradients of each part; nothing unless all of them have accumulators."""
        adapted = [part for part in self.parts if part.a is not None]
        if not all(_accumulates(part.a) and _accumulates(part.b) for part in adapted):
            return
        ranks = rows = 0
        for part in self.parts:
            if part.a is not None:
                rank = part.a.shape[0]
                yield _Place(part, slice(ranks, ranks + rank), slice(rows, rows + part.rows), self.groups)
                ranks += rank
            rows += part.rows

    def _scaled(
        self, y: torch.Tensor, weights: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """Return y with its columns times :meth:`row_factors`."""
        factors, lengths = self.row_factors(weights, a, b)
        magnitudes = [part.magnitude for part in self.parts if part.magnitude is not None]
        if not all(_accumulates(magnitude) for magnitude in magnitudes):
            return y * factors
        scaled: torch.Tensor = _Scaled.apply(y, factors.detach(), lengths, self.parts, self.groups, *magnitudes)
        return scaled

    def row_factors(
        self, weights: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return trained length / present length of each row, [out], 1 where a part has no adapter, and the latter."""
        lengths = self._lengths(weights, a.detach(), b.detach())
        present = lengths.view(self.groups, -1).split([part.rows for part in self.parts], dim=1)
        wanted = [
            now if part.magnitude is None else part.magnitude.view(self.groups, part.rows)
            for part, now in zip(self.parts, present)
        ]
        return (wanted[0] if len(wanted) == 1 else torch.cat(wanted, dim=1)).flatten() / lengths, lengths

    @torch.no_grad()
    def _lengths(self, weights: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the lengths of the rows of W + s B A, without making it: |W|² + 2 s (W Aᵀ) B + s² B (A Aᵀ) B."""
        wide = torch.promote_types(a.dtype, torch.float32)
        rows = [w.flatten(0, -2) for w in weights]
        own = torch.cat([torch.linalg.vector_norm(w, dim=1, dtype=wide) for w in rows]).square()
        both = torch.cat([fused.linear(w, a) for w in rows]).to(wide) * 2 + b.to(wide) @ (a @ a.t()).to(wide).mul(
            self.scale
        )
        square = own + (both * b.to(wide)).sum(dim=1).mul(self.scale)
        if self.norm_group is not None:
            dist.all_reduce(square, group=self.norm_group)
        return square.sqrt().to(a.dtype)


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
