"""Rules that need sums or maxima over rows, columns and matrices, and how these are reduced over ranks.

To such a rule a parameter is a stack of matrices: its last two dimensions are rows and columns, and what is in front of
them (experts, the gate and the up projection) numbers matrices that know nothing of one another. Biases and norms,
which do not decay, are stacks of vectors: matrices of one row.

A rule is a generator: it adds up what its rank's elements contribute, yields requests, and is given the sums over all
ranks. All parameters of a rank run in step, so that a round costs one all-reduce for each set of groups, of rows and
columns only. Every logical element contributes once: copies of key/value heads beyond the first do not count, nor does
padding, which no rectangle has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.native_update import HostUpdate, Update, UpdateRequest, device_update, settings_of
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.buckets import Bucket, shard_ranges
from megatron_port.core.optim.rules import OptimizerRule, StateKind, UpdateSettings
from megatron_port.core.optim.sharded import ShardedParameters

LARGEST = 1 << 22
"""Elements of a rectangle: what temporaries are made for at a time."""


def is_matrix(record: ParameterRecord) -> bool:
    """Return whether a parameter's last two dimensions are a matrix, not one of them a stack of vectors."""
    return record.decay and len(record.shape) > 1


@dataclass(frozen=True)
class Rectangle:
    """Elements of one matrix that are neighbours in a flat range: whole rows, or a part of one."""

    place: int
    """Index of the place that has them (``LogicalTensor.places``)."""
    flat: slice
    """In the flat range."""
    matrix: int
    """Number of the matrix in this rank's stack."""
    rows: slice
    """Among the rows of all matrices of the stack."""
    columns: slice

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements in a flat tensor of the place, [rows, columns]. A view."""
        return flat[self.flat].view(self.rows.stop - self.rows.start, -1)


def rectangles(
    start: int, stop: int, rows: int, columns: int, *, place: int = 0, largest: int = LARGEST
) -> Iterator[Rectangle]:
    """Yield the rectangles of elements [start, stop) of a flattened stack of matrices [rows, columns], in order."""
    at = start
    while at < stop:
        row, column = divmod(at, columns)
        matrix, within = divmod(row, rows)
        if column or stop - at < columns:
            count, end = 1, min(columns, column + stop - at)
        else:
            count, end = min((stop - at) // columns, rows - within, max(1, largest // columns)), columns
        numel = count * (end - column)
        yield Rectangle(
            place, slice(at - start, at - start + numel), matrix, slice(row, row + count), slice(column, end)
        )
        at += numel


@dataclass(frozen=True)
class LocalSlice:
    """This rank's slice of a parameter, and its range of the slice's elements, 1-D, without padding; maybe empty."""

    record: ParameterRecord
    master: torch.Tensor
    gradient: torch.Tensor
    """May be overwritten."""
    state: Mapping[str, torch.Tensor]
    """State of elements."""
    reduced: Mapping[str, torch.Tensor]
    """State of rows, 1-D over all rows of the stack; of columns, [matrices, columns]."""
    rows: int
    """Rows of the whole slice, over all matrices."""


@dataclass(frozen=True)
class Request:
    """Tensors to be summed, or whose maxima are to be found, over the ranks of each of ``groups``, in this order."""

    tensors: Sequence[torch.Tensor]
    groups: tuple[dist.ProcessGroup, ...]
    apart: str = ""
    """Not together with requests of another name: copies on other stages must round alike."""
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM


@dataclass
class LogicalTensor:
    """A parameter as a rank holds it: one slice, or two where neighbours share key/value heads."""

    ctx: ParallelContext
    places: list[LocalSlice]
    rectangles: list[Rectangle]
    shards: dist.ProcessGroup | None
    """Ranks among which the elements of a slice are divided."""
    matrices: int = field(init=False)
    """In this rank's stack."""
    rows: int = field(init=False)
    columns: int = field(init=False)
    """Number of columns of the logical matrix."""

    def __post_init__(self) -> None:
        record = self.record
        rows = 2 if self.is_matrix else 1
        self.matrices = prod(record.extent[:-rows])
        self.rows = record.shape[-2] if self.is_matrix else 1
        self.columns = record.shape[-1]

    @property
    def record(self) -> ParameterRecord:
        """Record of the first slice."""
        return self.places[0].record

    @property
    def is_matrix(self) -> bool:
        """Whether it is of matrices; otherwise of vectors."""
        return is_matrix(self.record)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the masters."""
        return self.places[0].master.dtype

    # -- what a rank's elements contribute ---------------------------------------------------------------------------

    def zeros_of_rows(self) -> list[torch.Tensor]:
        """Return zeros for each row of each place."""
        return [place.master.new_zeros(place.rows) for place in self.places]

    def zeros_of_columns(self) -> torch.Tensor:
        """Return zeros [matrices, columns] of this rank."""
        return self.places[0].master.new_zeros(self.matrices, self.record.extent[-1])

    def zeros_of_matrices(self) -> torch.Tensor:
        """Return a zero for each matrix."""
        return self.places[0].master.new_zeros(self.matrices)

    def columns_state(self, name: str) -> list[torch.Tensor]:
        """Return state of columns [matrices, columns], of every place: they are equal, and must stay so."""
        return [place.reduced[name] for place in self.places]

    # -- requests ----------------------------------------------------------------------------------------------------

    def over_columns(self, rows: list[torch.Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Request:
        """Return the request that completes a value for each row of each place."""
        return self._request(rows, op, {len(self.record.shape) - 1}, shards=True)

    def over_rows(self, columns: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Request:
        """Return the request that completes a value for each column."""
        return self._request([columns], op, {len(self.record.shape) - 2}, shards=True)

    def over_matrices(self, totals: torch.Tensor) -> Request:
        """Return the request that completes a sum for each matrix."""
        dims = len(self.record.shape)
        return self._request([totals], dist.ReduceOp.SUM, {dims - 1, dims - 2} if self.is_matrix else {dims - 1},
                             shards=True)

    def sum_of_rows(self, rows: Sequence[torch.Tensor]) -> Request:
        """Return the request for the sum, for each matrix, of what every rank has of its rows whole."""
        total = self.zeros_of_matrices()
        for place, values in zip(self.places, rows):
            if self._counts(place):
                total += values.view(self.matrices, place.rows // self.matrices).sum(1)
        return self._request([total], dist.ReduceOp.SUM, {len(self.record.shape) - 2}, shards=False)

    def _request(
        self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType, dims: set[int], *, shards: bool
    ) -> Request:
        groups = [self.shards] if shards else []
        if self._divided(dims):
            groups.append(self.ctx.over("tp"))
        tied = self.record.name if self.record.tied_key is not None else ""
        return Request(tensors, tuple(g for g in groups if g is not None), tied, op)

    def counts(self, rectangle: Rectangle) -> bool:
        """Return whether a rectangle contributes to sums over rows and matrices: not one of a further copy."""
        return self._counts(self.places[rectangle.place])

    def _divided(self, dims: set[int]) -> bool:
        """Whether tensor-parallel ranks have parts of some of these dimensions, so that sums are over all of them."""
        return any(shard.dim in dims and self.ctx.mesh.dims(*shard.axes) for shard in self.record.shards)

    def _counts(self, place: LocalSlice) -> bool:
        mesh = self.ctx.mesh
        copied = any("kv_heads" in shard.axes for shard in place.record.shards)
        # Where all ranks have all of a single head's, nothing is summed over them, and each counts its own.
        if not self._divided(set(range(len(self.record.shape)))):
            return True
        return not copied or mesh.index(self.ctx.rank, mesh.dims("kv_copies")) == 0


Rounds = Generator[Sequence[Request], None, None]
"""A rule's update of one parameter: yields requests, whose tensors are complete when it continues."""


def logical_tensors(sharded: ShardedParameters) -> list[LogicalTensor]:
    """Return the parameters that updates change, as this rank holds them, in the same order on all ranks of a stage.

    Raises:
        ConfigError: ranks divide the rows or columns of a parameter in a way that sums do not know.
    """
    slots: dict[str, list[tuple[Bucket, int]]] = {}
    for bucket in sharded.trained:
        for slot in bucket.plan.slots:
            slots.setdefault(sharded.parameters[slot.index][0].name, []).append((bucket, slot.index))
    reduced: dict[tuple[str, tuple[int, ...]], dict[str, torch.Tensor]] = {}
    for one in sharded.reduced:
        shape = (-1,) if one.kind.of == "row" else (-1, one.tensor.shape[-1])
        reduced.setdefault(one.record.place, {})[one.kind.name] = one.tensor.view(shape)
    out = []
    for members in slots.values():
        places: list[LocalSlice] = []
        rects: list[Rectangle] = []
        for bucket, index in members:
            record = sharded.parameters[index][0]
            _check_split(record)
            place, found = _place(sharded, bucket, index, reduced.get(record.place, {}), len(places))
            places.append(place)
            rects += found
        out.append(LogicalTensor(sharded.ctx, places, rects, members[0][0].gather_group))
    return out


def _check_split(record: ParameterRecord) -> None:
    lead = len(record.shape) - (2 if is_matrix(record) else 1)
    for shard in record.shards:
        if shard.dim >= lead and not set(shard.axes) <= {"tp", "kv_heads"}:
            raise ConfigError(
                f"{record.name}: its dimension {shard.dim} is divided over {' × '.join(shard.axes)}, over which this "
                'optimizer cannot sum; use optimizer.name "adamw"'
            )


def _place(
    sharded: ShardedParameters, bucket: Bucket, index: int, reduced: Mapping[str, torch.Tensor], number: int
) -> tuple[LocalSlice, list[Rectangle]]:
    record = sharded.parameters[index][0]
    columns = record.extent[-1]
    per_matrix = record.extent[-2] if is_matrix(record) else 1
    rows, logical = prod(record.extent[:-1]), prod(record.extent)
    empty = bucket.masters[:0]
    found = [f for f in shard_ranges(bucket.plan, shard=bucket.index) if f.index == index]
    if not found or found[0].start >= logical:
        return LocalSlice(record, empty, bucket.sums[:0], {}, reduced, rows), []
    (f,) = found
    numel = min(f.start + f.numel, logical) - f.start  # padding lies at the end
    at = slice(f.at - bucket.shard_slice.start, f.at - bucket.shard_slice.start + numel)
    state = {
        kind.name: bucket.state[kind][r.span][:numel] for kind in sharded.rule.state(record) if kind.divided
        for r in bucket.layouts[kind].ranges if r.index == index
    }
    place = LocalSlice(record, bucket.masters[at], bucket.sums[at], state, reduced, rows)
    return place, list(rectangles(f.start, f.start + numel, per_matrix, columns, place=number))


def run_rounds(updates: Sequence[Rounds]) -> None:
    """Run the updates of all parameters in step, and reduce what they ask for. Collective."""
    asked: dict[int, Sequence[Request]] = {}
    for i, update in enumerate(updates):
        _advance(asked, i, update)
    while asked:
        together: dict[tuple[object, ...], list[Request]] = {}
        for i in sorted(asked):
            for request in asked[i]:
                if request.groups:
                    key = (*map(id, request.groups), request.apart, str(request.op))
                    together.setdefault(key, []).append(request)
        for requests in together.values():
            _reduce(requests)
        for i in sorted(asked):
            _advance(asked, i, updates[i])


def _advance(asked: dict[int, Sequence[Request]], i: int, update: Rounds) -> None:
    try:
        asked[i] = next(update)
    except StopIteration:
        asked.pop(i, None)


def _reduce(requests: Sequence[Request]) -> None:
    tensors = [tensor for request in requests for tensor in request.tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for group in requests[0].groups:
        dist.all_reduce(flat, op=requests[0].op, group=group)
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()


# Rules that need sums over rows, columns and matrices, and the native engine's update by them.

class SumsRule(OptimizerRule):
    """A rule whose update needs sums or maxima over rows, columns or matrices of the logical tensor."""

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of :meth:`state`."""
        return tuple(kind.name for kind in self.state(record))

    @abstractmethod
    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the state tensors of a parameter."""

    @abstractmethod
    def rounds(self, tensor: LogicalTensor, settings: UpdateSettings) -> Rounds:
        """Update the masters and the state of one parameter in place.

        Every rank that holds a part runs the same rounds, in which requests have the same sizes.
        """


class SumsUpdate(HostUpdate):
    """A rule that needs sums over rows, columns and matrices: all parameters in step, their sums reduced together."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig, rule: SumsRule, *, seed: int) -> None:
        super().__init__(sharded, config)
        self.rule, self.seed, self.tensors = rule, seed, logical_tensors(sharded)

    @torch.no_grad()
    def _apply(self, lr: float) -> None:
        settings = settings_of(self.config, step=self.steps + 1, lr=lr, seed=self.seed)
        run_rounds([self.rule.rounds(tensor, settings(tensor.record)) for tensor in self.tensors])


@device_update.register
def _by_sums(rule: SumsRule, asked: UpdateRequest) -> Update:
    return SumsUpdate(asked.sharded, asked.config, rule, seed=asked.seed)
