"""One process that rounds where a layout rounds.

Tensor parallelism cuts sums: of a row-parallel linear's contraction, of the input's gradient of a column-parallel one
and of the head, of the loss over the vocabulary; sequence parallelism those of the gradients of norms and biases over
tokens. In bf16 and fp16 every rank's part is rounded before the parts are added, and DeepSpeed rounds each gradient to
the dtype before it adds it to its fp32 sum. That moves a run as much as anything does that rounding may. One process
that cuts and rounds in the same places moves with it: what a layout differs from *that* by is far less, on processors
whose products do not depend on the shape of the matrices often nothing (docs/parity.md).

Sums over ranks are added in the order of gloo's ring. Two parts have one order only; with more, other backends may
have another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_port.core.config.schema import PrecisionConfig, RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.positions import SequencePartition
from megatron_port.core.dist.record import record_of
from megatron_port.core.layers import fused
from megatron_port.core.layers.cross_entropy import CrossEntropyOps
from megatron_port.core.layers.embedding import VocabParallelEmbedding, padded_vocab_size, table_rows
from megatron_port.core.layers.linear import PLAIN, ColumnParallelLinear, LinearKernels, RowParallelLinear, linear
from megatron_port.core.model.attention import SelfAttention, rank_rows
from megatron_port.core.model.layers import Embedding, Head, Norm, TransformerLayer
from megatron_port.core.model.mlp import MLP
from megatron_port.core.model.residual import ResidualStream
from megatron_port.core.model.spec import GroupedAttentionSpec
from megatron_port.core.optim.gradients import LossScaler
from megatron_port.ext.experts.moe import Experts, MoE
from megatron_port.ext.mixers.projection_norm import ProjectionNorm
from megatron_port.ext.mixers.recurrent import Recurrent
from megatron_port.ext.weights.few_bits import FewBitLinearKernels
from megatron_port.ext.weights.low_rank import FactoredColumnLinear
from megatron_port.ext.weights.shared_layers import separate_use
from megatron_port.tools.parity.comparison import (
    FIRST_STEP,
    FP32,
    ROUNDOFF,
    SPREAD_FACTOR,
    Deviation,
    Run,
    compare,
    distances,
    first_step,
    spread,
)
from megatron_port.tools.parity.rank_sums import ring_sum
from megatron_port.tools.parity.shared_rows import split_units

Pieces = tuple[slice, ...]


@dataclass(frozen=True)
class RoundingEmulation:
    """Rounding of a layout that one process, engine native, can emulate."""

    tensor_parallel_size: int = 1
    vocab_padding_multiple: int = 1
    sequence_parallel: bool = False
    rounded_weight_gradients: bool = False
    """To the dtype, before they are added up: DeepSpeed takes every gradient from autograd."""
    tied_in_the_dtype: bool = False
    """The two gradients of a tied table are added in the compute dtype, by autograd: DeepSpeed with one stage."""

    @classmethod
    def of(cls, config: RunConfig, topology: Topology) -> RoundingEmulation | None:
        """Return where a run's layout and engine round; None: nowhere, or in 8-bit products, which each rank scales by
        itself."""
        deepspeed = config.engine == "deepspeed"
        if config.precision.fp8 != "none" or (topology.tp == 1 and not deepspeed):
            return None
        return cls(
            topology.tp, config.layout.vocab_padding_multiple if topology.tp > 1 else 1,
            sequence_parallel=config.layout.sequence_parallel and topology.tp > 1,
            rounded_weight_gradients=deepspeed, tied_in_the_dtype=deepspeed and topology.pp == 1,
        )

    def emulate_rounding(self, stage: nn.Module) -> None:
        """Make the model of a single process, engine native, round in these places."""
        tp = self.tensor_parallel_size
        for parameter in stage.parameters() if self.rounded_weight_gradients else ():
            if hasattr(torch.Tensor, "grad_dtype"):
                parameter.grad_dtype = parameter.dtype
            for place in ("slot_sums", "use_sums"):
                if hasattr(parameter, place):
                    delattr(parameter, place)
        for module in list(stage.modules()):
            if isinstance(module, SelfAttention) and tp > module.spec.groups.groups:
                self._cut_shared(module)
            elif isinstance(module, ColumnParallelLinear) and isinstance(module.kernels, SharedRowsLinearKernels):
                continue
            elif isinstance(module, RowParallelLinear):
                module.kernels = self._kernels(module.kernels, inputs=_equal(module.weight.shape[1], tp))
            elif isinstance(module, ColumnParallelLinear):
                packed = module.weight.shape[0] if module.weight.ndim == 3 else 1
                outputs = _equal(module.weight.shape[-2], tp)
                module.kernels = self._kernels(module.kernels, outputs=outputs, packed=packed)
            elif isinstance(module, Head):
                self._cut_head(module)
            elif isinstance(module, Recurrent) and module.shared is not None:
                split_units(module, tp)
            elif isinstance(module, Norm) and (
                module.gradient == "heads" or (self.sequence_parallel and module.gradient == "tokens")
            ):
                _cut_norm(module, tp)
            elif isinstance(module, Embedding) and module.position_reset and (
                self.sequence_parallel or self.rounded_weight_gradients
            ):
                _cut_positions(module, tp if self.sequence_parallel else 1, by_autograd=self.rounded_weight_gradients)
            elif isinstance(module, VocabParallelEmbedding) and self.rounded_weight_gradients:
                module.by_autograd = True
            elif isinstance(module, TransformerLayer) and self.sequence_parallel:
                module.residual = _SplitResidual.of(module.residual, tp)

    def _kernels(
        self, each: LinearKernels, *, inputs: Pieces = (), outputs: Pieces = (), packed: int = 1
    ) -> SplitSumLinearKernels:
        return SplitSumLinearKernels(inputs, outputs, packed, self.rounded_weight_gradients, each)

    def _cut_shared(self, attention: SelfAttention) -> None:
        """Let attention run as on ranks that share key/value heads: each has its query heads and its copy."""
        heads, tp = attention.spec.groups, self.tensor_parallel_size
        linear_ = attention.qkv.high if isinstance(attention.qkv, FactoredColumnLinear) else attention.qkv
        assert isinstance(linear_, ColumnParallelLinear) and isinstance(attention.spec, GroupedAttentionSpec)
        rows_of = attention.spec.qkv.groups  # a gate behind each query has rows as a query has
        assert rows_of is not None
        ranks = tuple(
            tuple(slice(r.start, r.start + r.count) for r in rank_rows(rows_of, tp, rank)) for rank in range(tp)
        )
        linear_.kernels = SharedRowsLinearKernels(ranks, self.rounded_weight_gradients, linear_.kernels)
        attention.groups, attention.heads_per_group = tp, heads.heads // tp
        attention.split_sums_bias = False  # what is added below has other rows than the bias

        def forward(x: Tensor) -> Tensor:
            bias = None
            if linear_.bias is not None:
                bias = torch.cat([_share(linear_.bias, i)[rows] for i, own in enumerate(ranks) for rows in own])
            return linear(x, linear_.weight, bias, kernels=linear_.kernels)

        linear_.forward = forward  # type: ignore[method-assign,assignment]
        if isinstance(attention.key_norm, ProjectionNorm):
            norm, d, copies = attention.key_norm, heads.head_size, tp // heads.groups

            def weights(features: int) -> Tensor:
                parts = [_share(norm.weight, i)[i // copies * d : (i // copies + 1) * d] for i in range(tp)]
                return torch.cat(parts)

            norm.weights = weights  # type: ignore[method-assign]

    def _cut_head(self, head: Head) -> None:
        vocab, tp = record_of(head.weight).shape[0], self.tensor_parallel_size
        share = padded_vocab_size(vocab, tp=tp, multiple=self.vocab_padding_multiple) // tp
        pieces = tuple(slice(min(i * share, vocab), min((i + 1) * share, vocab)) for i in range(tp))
        kernels = self._kernels(PLAIN, outputs=pieces)
        head.cross_entropy = _CutCrossEntropy(head.cross_entropy, tuple(p for p in pieces if p.start < p.stop))

        def logits(y: Tensor) -> Tensor:
            weight = head.weight.view_as(head.weight) if self.tied_in_the_dtype else head.weight
            return head.capped(linear(y, weight, head.bias, kernels=kernels))

        head.logits = logits  # type: ignore[method-assign]


def _equal(size: int, pieces: int) -> Pieces:
    share = size // pieces
    return tuple(slice(i * share, (i + 1) * share) for i in range(pieces))


@dataclass(frozen=True)
class SplitSumLinearKernels:
    """The kernels of a linear in the compute dtype, with sums split and rounded as the ranks that share it do."""

    inputs: Pieces = ()
    """The ranks' inputs, of a row-parallel linear: y = x Wᵀ is a sum over ranks."""
    outputs: Pieces = ()
    """The ranks' rows of each of ``packed`` matrices, of a column-parallel linear: dx = dy W is a sum over ranks."""
    packed: int = 1
    rounded: bool = False
    """The weight's gradient is rounded to the compute dtype before it is added to the sum."""
    each: LinearKernels = PLAIN
    """Kernels of each part's products: in the compute dtype, or with weights of few bits, whose groups no part cuts."""

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if not self.inputs:
            return self.each.forward(x, weight, weight_2d, bias)
        assert bias is None  # a row-parallel linear adds it after the sum
        return ring_sum([self.each.forward(x[..., p], weight, weight_2d[:, p], None)[0] for p in self.inputs]), None

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output_2d, grad_output_2d

    def dgrad(self, grad_output_2d: Tensor, weight: Tensor, weight_2d: Tensor) -> Tensor:
        if not self.outputs:
            return self.each.dgrad(grad_output_2d, weight, weight_2d)
        given = grad_output_2d.view(grad_output_2d.shape[0], self.packed, -1)
        matrices = weight_2d.view(self.packed, -1, weight_2d.shape[1])
        return ring_sum([
            self.each.dgrad(given[:, :, p].flatten(1), weight, matrices[:, p].flatten(0, 1)) for p in self.outputs
        ])

    def wgrad(self, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        return self.each.wgrad(grad_output_2d, x, saved_input_scale)

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        if not self.rounded:
            self.each.wgrad_accumulate(main_grad, grad_output_2d, x, saved_input_scale, first=first)
            return
        if first:
            main_grad.zero_()
        main_grad.add_(fused.product(grad_output_2d.t(), x))


@dataclass(frozen=True)
class SharedRowsLinearKernels:
    """The products of the fused projection where ranks share key/value heads. The output has every rank's columns, one
    rank after the other, so a shared row has as many columns as ranks that hold it, each with its own gradient."""

    ranks: tuple[Pieces, ...]
    """Rows of each rank's two weights."""
    rounded: bool = False
    each: LinearKernels = PLAIN
    """Both as :class:`SplitSumLinearKernels`."""

    def _split(self, columns: Tensor) -> Iterator[list[tuple[slice, Tensor]]]:
        """Yield for each rank (rows, its columns [tokens, rows]) of its two weights."""
        sizes = [p.stop - p.start for own in self.ranks for p in own]
        parts = iter(columns.split(sizes, dim=1))
        for own in self.ranks:
            yield [(rows, next(parts).contiguous()) for rows in own]

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return y [..., all ranks' columns]; ``bias`` has every column too."""
        rows = [p for own in self.ranks for p in own]
        biases = [None] * len(rows) if bias is None else bias.split([p.stop - p.start for p in rows])
        made = [self.each.forward(x, weight, weight_2d[p], b)[0] for p, b in zip(rows, biases)]
        return torch.cat(made, dim=-1), None

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output_2d, grad_output_2d

    def dgrad(self, grad_output_2d: Tensor, weight: Tensor, weight_2d: Tensor) -> Tensor:
        parts = []
        for own in self._split(grad_output_2d):
            first, second = (self.each.dgrad(columns, weight, weight_2d[p]) for p, columns in own)
            parts.append(first + second)
        return ring_sum(parts)

    def wgrad(self, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        rows = max(p.stop for own in self.ranks for p in own)
        main_grad = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=x.device)
        self.wgrad_accumulate(main_grad, grad_output_2d, x, saved_input_scale)
        return main_grad

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        if first:  # a row may be added to by several ranks
            main_grad.zero_()
        for own in self._split(grad_output_2d):
            for p, columns in own:
                kernels = SplitSumLinearKernels(rounded=self.rounded)
                kernels.wgrad_accumulate(main_grad[p], columns, x, saved_input_scale)


@dataclass(frozen=True)
class _CutCrossEntropy:
    """A provider's cross-entropy with the sums of the ranks' columns, added as ``layers.cross_entropy`` does."""

    ops: CrossEntropyOps
    pieces: Pieces

    def statistics(self, logits: Tensor, labels: Tensor, *, offset: int, extent: int) -> tuple[Tensor, Tensor, Tensor]:
        found = [
            self.ops.statistics(logits[..., p].contiguous(), labels, offset=offset + p.start, extent=p.stop - p.start)
            for p in self.pieces
        ]
        maximum = torch.stack([m for m, _, _ in found]).amax(dim=0)
        sums = ring_sum([torch.stack((total * (m - maximum).exp(), target)) for m, total, target in found])
        return maximum, sums[0], sums[1]

    def gradient_(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
    ) -> None:
        self.ops.gradient_(logits, labels, maximum, total, grad, offset=offset, extent=extent)


def _share(parameter: Tensor, place: int) -> Tensor:
    """The parameter as the rank at a place uses it. The first one's gradient arrives as every gradient does; that of
    another use goes to the fp32 sum by itself."""
    if place == 0 or not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter
    owner: Any = getattr(parameter, "parameter", parameter)  # of the use that one of several layers makes of it
    return separate_use(owner, lambda grad: owner.wgrad_accumulator.main_grad_of(owner).add_(grad))


def _cut_norm(norm: Norm, ranks: int) -> None:
    """Let a norm run as on ranks that have a part of the tokens, or of the groups of heads, each."""
    dim = 2 if norm.gradient == "heads" else 0  # [seq, batch, groups, heads, d] or [seq, batch, hidden]
    kernel = norm.providers.rms_norm if norm.kind == "rmsnorm" else norm.providers.layer_norm

    def run(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        out = []
        for i, part in enumerate(x.chunk(ranks, dim)):
            rest = None if residual is None else residual.chunk(ranks, dim)[i]
            bias = None if norm.bias is None else _share(norm.bias, i)
            out.append(kernel(part.contiguous(), rest, norm.gain(_share(norm.weight, i)), bias, norm.eps))
        return torch.cat([y for y, _ in out], dim), torch.cat([total for _, total in out], dim)

    norm._run = run  # type: ignore[method-assign]


def _cut_positions(embedding: Embedding, ranks: int, *, by_autograd: bool) -> None:
    """Let an embedding look up the positions that documents reset as ranks that have a part of the tokens each: their
    gradients are sums over tokens, which autograd rounds (``by_autograd``) or an engine adds as they are."""

    def rows_of(module: Embedding, x: Tensor) -> Tensor:
        index, table = module.document_positions(len(x)), module.position
        if index is None or table is None:
            return module.own_positions(x)
        return torch.cat([table_rows(part, _share(table, i), by_autograd=by_autograd)
                          for i, part in enumerate(index.chunk(ranks))])

    embedding.position_rows = rows_of


@dataclass(frozen=True)
class _SplitResidual(ResidualStream):
    """Residual stream that adds biases to each rank's tokens by themselves."""

    ranks: tuple[ResidualStream, ...] = ()

    @classmethod
    def of(cls, residual: ResidualStream, ranks: int) -> _SplitResidual:
        """Return a copy of a layer's residual stream, with that of each of the ranks that would divide it."""
        parts = tuple(
            dataclasses.replace(residual, partition=SequencePartition(piece=i, pieces=ranks)) for i in range(ranks)
        )
        # The norm that follows is cut by itself (_cut_norm).
        return cls(**vars(dataclasses.replace(residual, fused_norm=None)), ranks=parts)

    def biased(self, x: Tensor, bias: Tensor | None) -> Tensor:
        count = len(self.ranks)
        return x if bias is None else torch.cat([part + _share(bias, i) for i, part in enumerate(x.chunk(count))])

    def bias_dropout_add(self, x: Tensor, bias: Tensor | None, residual: Tensor, *, op: str) -> Tensor:
        count, out = len(self.ranks), []
        for i, (rank, part, rest) in enumerate(zip(self.ranks, x.chunk(count), residual.chunk(count))):
            own = None if bias is None else _share(bias, i)
            out.append(rank.bias_dropout_add(part, own, rest, op=op))
        return torch.cat(out)


# Other orders of the same sums on one process: what rounding alone may change.
#
# bf16 and fp16 have no bound that suits every model. What a layout may differ by
# is measured instead: the same run on one process with its samples in another
# order, in micro-batches of another size, and with every linear's contraction
# cut in random pieces that are rounded before they are added, as tensor
# parallelism cuts it in pieces of its own.

@dataclass(frozen=True)
class Reordering:
    """Order of one process's sums. ``micro_batches``: into how many the global batch is cut (as far as it divides)."""

    micro_batches: int
    order_seed: int
    chunks: int
    """Pieces of every split linear's contraction."""

    def micro_batch_size(self, global_batch: int) -> int:
        """Return the micro-batch size: the largest divisor of the batch up to batch / micro_batches."""
        wanted = max(global_batch // self.micro_batches, 1)
        return max(b for b in range(1, wanted + 1) if global_batch % b == 0)

    def order(self, global_batch: int) -> list[int]:
        """Return a permutation of the batch's samples."""
        generator = torch.Generator().manual_seed(self.order_seed)
        return torch.randperm(global_batch, generator=generator).tolist()


REORDERINGS = (
    Reordering(8, 0, 1), Reordering(4, 1, 1), Reordering(2, 2, 1), Reordering(1, 3, 1),
    Reordering(4, 4, 2), Reordering(2, 5, 2), Reordering(8, 6, 2), Reordering(4, 7, 4),
)
"""The eight that tolerances are measured with."""
ORDERS: tuple[Reordering | None, ...] = (None, *sorted(REORDERINGS, key=lambda r: -r.chunks))
"""One process in its own order and in the eight, those first that change most."""


def _pieces(
    size: int, reordering: Reordering, place: int, device: torch.device, group: int = 1
) -> tuple[torch.Tensor, ...]:
    """Return a random partition of ``range(size)`` into the reordering's pieces, another for every linear; ``group``
    neighbours stay together."""
    generator = torch.Generator().manual_seed(1_000 * reordering.order_seed + place)
    drawn = torch.randperm(size // group, generator=generator).chunk(reordering.chunks)
    return tuple((part[:, None] * group + torch.arange(group)).flatten().to(device) for part in drawn)


def _row(module: RowParallelLinear, reordering: Reordering, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    # Weights of few bits have a scale for each group, which no piece may cut.
    group = module.kernels.group_size if isinstance(module.kernels, FewBitLinearKernels) else 1
    pieces = _pieces(module.weight.shape[1], reordering, place, module.weight.device, group)

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = [linear(x[..., piece], module.weight[:, piece], kernels=module.kernels) for piece in pieces]
        y = sum(parts[1:], parts[0])
        return y if module.bias is None or module.skip_bias else y + module.bias

    return forward


def _columns(
    x: torch.Tensor, weight: torch.Tensor, pieces: Sequence[torch.Tensor], kernels: LinearKernels
) -> torch.Tensor:
    """Return x Wᵀ, whose backward pass adds as many input gradients as there are pieces of W's rows."""
    parts = [linear(x, weight[piece], kernels=kernels) for piece in pieces]
    return torch.cat(parts, dim=-1)[..., torch.cat(tuple(pieces)).argsort()]


def _column(module: ColumnParallelLinear, reordering: Reordering, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    pieces = _pieces(module.weight.shape[:-1].numel(), reordering, place, module.weight.device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _columns(x, module.weight.flatten(0, -2), pieces, module.kernels)
        return y if module.bias is None or module.skip_bias else y + module.bias.flatten()

    return forward


def _head(module: Head, reordering: Reordering, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    pieces = _pieces(module.weight.shape[0], reordering, place, module.weight.device)

    def logits(y: torch.Tensor) -> torch.Tensor:
        found = _columns(y, module.weight, pieces, PLAIN)
        return module.capped(found if module.bias is None else found + module.bias)

    return logits


def apply_reduction_order(stage: nn.Module, reordering: Reordering) -> None:
    """Make every split linear (the head too) of a single-process model add rounded partial sums of random pieces.

    Random ones, because what rounding does to a run depends on where the sums are cut far more than on the order of
    samples, and is the same at every step: runs that are all cut in the same place would be one measurement.
    """
    if reordering.chunks < 2:
        return
    for place, module in enumerate(stage.modules()):
        if isinstance(module, RowParallelLinear):
            module.forward = _row(module, reordering, place)  # type: ignore[method-assign, assignment]
        elif isinstance(module, ColumnParallelLinear):
            module.forward = _column(module, reordering, place)  # type: ignore[method-assign, assignment]
        elif isinstance(module, Head):
            module.logits = _head(module, reordering, place)  # type: ignore[method-assign, assignment]


# Half precision: is a layout's run within what rounding may do to it?
#
# Three questions, each with its bounds (``parity.comparison``): is the first step that of one process which rounds
# where the layout does, are the steps after it as near to that process as its own reordered sums are to one another,
# and is that process itself near to the plain one and to fp32? Without the last, an error that the layout and the
# emulation have in common would be seen by neither.

@dataclass(frozen=True)
class SingleRuns:
    """Runs of one process that half precision is judged by; what is not needed is not run."""

    rounding_there: Run
    """Rounds where the layout does."""
    ordered: Callable[[int], Sequence[Run]]
    """The first so many of ``reorder.ORDERS``."""
    plain: Callable[[], Run]
    """Cuts no sum; its first step."""
    fp32: Callable[[], Run]
    """Its first step."""
    noisy: Callable[[], Sequence[Run]]
    """First steps with random errors instead of rounding (``parity.emulation``)."""


def within_rounding(config: RunConfig, other: Run, single: SingleRuns) -> list[Deviation]:
    """Return every deviation of a layout's run in half precision (or of free-running steps in fp32), with its bound.
    ``config``: with that layout.

    Norms at the ends of branches make large what rounding leaves of them: there a first step outside its bounds is held
    to the distances of the reference, as divided sequences are, whose sums nothing emulates.

    The spread only grows with each run that it is measured with, and is never under fp32's bounds: once nothing is over
    it the verdict is that of all eight, and the others are not run. Products in 8 bits have the spread alone: ranks
    scale their pieces by themselves.
    """
    dtype, model, reference = config.precision.dtype, config.model, single.rounding_there
    first = FIRST_STEP.get(dtype, FP32)
    floor = replace(FP32, key_bias=first.key_bias)
    out, exact = [], config.precision.fp8 == "none"
    apart = config.layout.context_parallel_size > 1
    if exact and not apart:
        out += compare(first_step(reference), first_step(other), first, model)
        if {"post", "sandwich"} & {model.norm_placement, *model.norm_pattern} and not all(d.ok for d in out):
            apart, out = True, []
    free: list[Deviation] = []
    alike = all(d.ok for d in out)  # else the verdict stands, and what later steps make of it says nothing
    for measured in (0, 3, 5, len(ORDERS)) if alike else ():
        bound = spread(single.ordered(measured), model, name=dtype, floor=floor).scaled(SPREAD_FACTOR)
        what = f"the spread of {measured} orders" if measured else "fp32's bounds"
        free = compare(reference, other, replace(bound, name=f"all steps, {SPREAD_FACTOR:g} x {what}"), model)
        if all(d.ok for d in free):
            break
    out += free
    if dtype in ROUNDOFF and exact:
        noise = functools.cache(lambda: (single.fp32(), single.noisy()))
        held = [(reference, "the reference"), *([(other, "the layout")] if apart else [])]
        for start, rule in ((single.plain(), "from the plain process"), (single.fp32(), "from fp32")):
            for run, name in held:
                out += distances(start, run, dtype, model, rule=f"{name}, {rule}", noise=noise)
    return out


# Random errors in the place of rounding: how far may half precision move a gradient at all?
#
# A gradient that is a sum of terms of both signs keeps the errors of its terms and not their size. The terms of the
# norms of queries and keys and of sinks are differences themselves (of what a softmax passes back, behind a
# soft-cap's slope), and what a norm at a branch's end makes large was small before. How ill-conditioned that is
# depends on the model and on the batch, so it is measured: a process in fp32 is given errors as large as half
# precision's can be, in the places where half precision rounds. What they change is the unit of what half precision
# changed (docs/parity.md).

SEEDS = range(16)
"""Seeds of the errors, one per process."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Noisy(torch.autograd.Function):
    """Add errors to a result, and others to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Callable[[Tensor, float], Tensor], scale: float) -> Tensor:
        ctx.noise, ctx.scale = noise, scale
        return noise(x, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.noise(grad, ctx.scale), None, None


@dataclass(frozen=True)
class RoundingNoise:
    """Random errors, uniform within the largest that rounding to ``dtype`` makes, of weights, results and gradients."""

    seed: int
    dtype: str
    loss_scale: float = 1.0
    """Factor of the gradients that are rounded, which lifts small ones out of fp16's subnormal numbers."""

    @classmethod
    def of(cls, precision: PrecisionConfig) -> list[RoundingNoise]:
        """Return the noise of each of the processes that a run in half precision is judged by."""
        return [cls(seed, precision.dtype, LossScaler(precision).scale) for seed in SEEDS]

    def emulate_rounding(self, stage: nn.Module) -> None:
        """Give these errors to the model of a single process that rounds nothing itself."""
        generator, info = torch.Generator().manual_seed(self.seed), torch.finfo(_DTYPES[self.dtype])

        def noise(x: Tensor, scale: float) -> Tensor:
            error = (x.abs() * (info.eps / 2)).clamp_min(info.smallest_normal * info.eps / 2 / scale)
            return x + error * (2 * torch.rand(x.shape, generator=generator) - 1).to(x)

        def noisy(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(noisy, x))
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            return _Noisy.apply(x, noise, self.loss_scale)  # type: ignore[no-untyped-call]

        for parameter in stage.parameters():
            parameter.data.copy_(noise(parameter.data, 1.0))
        for module in list(stage.modules()):
            if isinstance(module, Embedding | Head | Norm | ColumnParallelLinear | RowParallelLinear | MoE):
                module.register_forward_hook(lambda _module, _inputs, out: noisy(out))
            elif isinstance(module, SelfAttention):
                _around_attention(module, noisy)
            elif isinstance(module, Recurrent):
                _around_recurrence(module, noisy)
            if isinstance(module, MLP | Experts):
                _around_activation(module, noisy)
            if isinstance(module, Experts):
                _around_results(module, noisy)


def _around_attention(module: SelfAttention, noisy: Callable[[Any], Any]) -> None:
    """Add errors to queries, keys and values as attention takes them, and to what it mixes."""
    split, values = module.split, module.values
    module.split = lambda y: noisy(split(y))  # type: ignore[method-assign]
    module.values = lambda out: values(noisy(out))  # type: ignore[method-assign]


def _around_recurrence(module: Recurrent, noisy: Callable[[Any], Any]) -> None:
    """Add errors to the rows that units share, and to the result; all between is in fp32 in half precision, too."""
    mix, shared = module.mix, module.shared
    module.mix = lambda packed: noisy(mix(packed))  # type: ignore[method-assign]
    if isinstance(shared, nn.Module):
        shared.register_forward_hook(lambda _module, _inputs, out: noisy(out))


def _around_activation(module: MLP | Experts, noisy: Callable[[Any], Any]) -> None:
    """Add errors to an activation, and to its argument unless that is the output of a module."""
    activate, before = module.activate, noisy if isinstance(module, Experts) else lambda hidden: hidden
    module.activate = lambda hidden: noisy(activate(before(hidden)))  # type: ignore[method-assign]


def _around_results(module: Experts, noisy: Callable[[Any], Any]) -> None:
    """Add errors to the results of experts."""
    down = module.down
    module.down = lambda rows, exchange: noisy(down(rows, exchange))  # type: ignore[method-assign]
