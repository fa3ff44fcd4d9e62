"""Rules that need whole matrices, which are brought together on one rank each and taken apart again.

A rank holds, of a matrix of the logical model, a range of its tensor-parallel slice. Two exchanges bring it together:
among the ranks that divide the slices' elements (ZeRO), so that one of them has the slice, and among tensor-parallel
ranks, so that one of these has the matrix. Owners are chosen by cost, largest matrix first, each to the rank with the
least to do; the same arithmetic on every rank. What the rule makes of it goes back the same way, also to ranks that
hold copies, which are then equal to the bit. A step moves each element there and back once at each level where it does
not lie whole, in the dtype that the rule computes in; the planner counts the same bytes.

What is a matrix of its own is said by the record: each of a stack (experts, the gate and the up projection), and of a
fused projection the rows of each of its parts (``ParameterRecord.row_runs``).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist

from megatron_port.core.config.optimizer import LAMBOptions, MuonOptions
from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.mesh import MeshDims
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.native_update import HostUpdate, Update, UpdateRequest, device_update, settings_of
from megatron_port.core.optim.buckets import Bucket, StateShard, shard_ranges
from megatron_port.core.optim.rules import AdamW, OptimizerRule, StateKind, UpdateSettings
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.ext.rules.elementwise import MOMENTUM
from megatron_port.ext.rules.sums import LogicalTensor, Rounds, SumsRule, rectangles


class MatrixRule(OptimizerRule):
    """A rule that updates whole matrices, and other parameters element by element."""

    @abstractmethod
    def takes(self, record: ParameterRecord) -> bool:
        """Return whether a parameter is one of matrices to the rule: its last two dimensions."""

    @abstractmethod
    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        """Update a range of a parameter that :meth:`takes` refuses, as ``ElementwiseRule.update_``."""

    @abstractmethod
    def prepare_(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        """Replace a range of a matrix's gradient by what :meth:`transform` is to see, and update its state."""

    @abstractmethod
    def transform(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return what becomes of one whole matrix [rows, columns], of the same shape and dtype."""

    @abstractmethod
    def factor(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate of a matrix of this logical shape."""

    @abstractmethod
    def apply_(self, master: torch.Tensor, update: torch.Tensor, factor: float, settings: UpdateSettings) -> None:
        """Apply a range of what :meth:`transform` returned, times ``factor``, to the range of the masters."""


def shapes_of(record: ParameterRecord) -> list[tuple[int, int]]:
    """Return rows and columns of each logical matrix that one matrix [rows, columns] of a parameter stands for."""
    rows, columns = record.shape[-2:]
    if not record.row_runs:
        return [(rows, columns)]
    turns = rows // sum(record.row_runs)
    return [(turns * length, columns) for length in record.row_runs]


def cost_of(record: ParameterRecord) -> float:
    """Return what one matrix of a parameter costs, in multiplications of a product with its transpose."""
    return float(sum(min(rows, columns) * rows * columns for rows, columns in shapes_of(record)))


@dataclass(frozen=True)
class Part:
    """This rank's slice of a matrix: elements [low, high) of a parameter's flattened slice, [rows, columns]."""

    bucket: Bucket
    index: int
    record: ParameterRecord
    low: int
    high: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the slice."""
        return self.record.local_shape[-2], self.record.local_shape[-1]

    @property
    def box(self) -> tuple[int, int, int, int]:
        """First row, rows, first column, columns in the logical matrix."""
        return self.record.offset[-2], self.shape[0], self.record.offset[-1], self.shape[1]

    def ranges(self, shard: int) -> list[tuple[int, int, int]]:
        """Return (first, last + 1, place in the bucket) of the slice's elements that a share of the bucket has."""
        return [
            (max(f.start, self.low), min(f.start + f.numel, self.high), f.at + max(0, self.low - f.start))
            for f in shard_ranges(self.bucket.plan, shard=shard)
            if f.index == self.index and f.start < self.high and f.start + f.numel > self.low
        ]


@dataclass
class Matrix:
    """A matrix of the logical model, as far as this rank has to do with it."""

    parts: list[Part]
    """One, or two where neighbours share key/value heads."""
    copies: bool
    """Tensor-parallel ranks hold the same; otherwise each its slice, or only this one has it."""
    split: bool
    owner: int = 0
    """Position, among the ranks that divide the slices' elements, of the one that gets them."""
    peer: int = 0
    """Position of the tensor-parallel rank that computes."""

    @property
    def record(self) -> ParameterRecord:
        """Record of the first part."""
        return self.parts[0].record


Box = tuple[int, int, int, int, int]
"""First row, rows, first column, columns of a slice in its matrix, and 1 where it is the first of its copies."""


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each item: the dearest first, each to the rank with the least to do so far."""
    loads, out = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        out[i] = min(range(ranks), key=loads.__getitem__)
        loads[out[i]] += costs[i]
    return out


class MatrixExchange:
    """The matrices of one rank's stage, and the two exchanges. Built without communication.

    ``dtype``: in which matrices travel and are computed.
    """

    def __init__(self, sharded: ShardedParameters, rule: MatrixRule, dtype: torch.dtype) -> None:
        self.sharded, self.rule, self.dtype, ctx = sharded, rule, dtype, sharded.ctx
        self.device = ctx.device
        self.tp = ctx.over("tp")
        self.tp_size = ctx.size("tp")
        self.matrices = self._collect()
        by_group: dict[MeshDims, list[Matrix]] = {}
        for matrix in self.matrices:
            bucket = matrix.parts[0].bucket
            by_group.setdefault(bucket.plan.reduce_dims if bucket.plan.shards > 1 else frozenset(), []).append(matrix)
        self.hops = [_Hop(members, dtype) for members in by_group.values()]
        for hop in self.hops:
            for matrix, owner in zip(hop.matrices, assign([cost_of(m.record) for m in hop.matrices], hop.size)):
                matrix.owner = owner
        # Among the matrices that one position has, so that all of tp share its work.
        for owned in self._by_owner():
            for matrix, peer in zip(owned, assign([cost_of(m.record) for m in owned], self.tp_size)):
                matrix.peer = peer
        number_of = {id(matrix): i for i, matrix in enumerate(self.matrices)}
        for hop in self.hops:
            hop.plan([number_of[id(matrix)] for matrix in hop.matrices])
        counts = [len(matrix.parts) for matrix in self.matrices]
        self._spans = [slice(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]
        self._bounds: list[list[Box]] = []

    def _collect(self) -> list[Matrix]:
        mesh, found = self.sharded.ctx.mesh, dict[tuple[str, int], Matrix]()
        tp = mesh.dims("tp")
        for bucket in self.sharded.trained:
            for slot in bucket.plan.slots:
                record = self.sharded.parameters[slot.index][0]
                if not self.rule.takes(record):
                    continue
                size, lead = prod(record.local_shape[-2:]), len(record.shape) - 2
                split = any(shard.dim >= lead and mesh.dims(*shard.axes) for shard in record.shards)
                copies = bool(tp) and not split and tp <= record.replicated_over(mesh)
                for number in range(prod(record.local_shape[:-2])):
                    part = Part(bucket, slot.index, record, number * size, (number + 1) * size)
                    found.setdefault((record.name, number), Matrix([], copies, split)).parts.append(part)
        return list(found.values())

    def _by_owner(self) -> list[list[Matrix]]:
        shared: dict[tuple[int, int], list[Matrix]] = {}
        for h, hop in enumerate(self.hops):
            for matrix in hop.matrices:
                if matrix.split or matrix.copies:
                    shared.setdefault((h, matrix.owner), []).append(matrix)
        return list(shared.values())

    # -- a step ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Replace the gradients of all matrices, which ``prepare_`` has seen, by the rule's updates. Collective."""
        slices: dict[int, list[torch.Tensor]] = {}
        for hop in self.hops:
            slices |= hop.gather()
        mine = [i for i in slices if self.matrices[i].split or self.matrices[i].copies]
        for i in slices:
            if i not in mine:
                slices[i] = [self._computed(self.matrices[i].record, slices[i][0])]
        if self.tp is not None and self._shared():
            self._over_tp(mine, slices)
        for hop in self.hops:
            hop.scatter(slices)

    def _shared(self) -> bool:
        """Whether tensor-parallel ranks have anything to exchange: alike on all of them."""
        return any(m.split or m.copies for m in self.matrices)

    def _computed(self, record: ParameterRecord, matrix: torch.Tensor) -> torch.Tensor:
        if not record.row_runs:
            return self.rule.transform(matrix)
        turns = matrix.view(-1, sum(record.row_runs), matrix.shape[-1])
        done = [
            self.rule.transform(rows.reshape(-1, matrix.shape[-1])).reshape(rows.shape)
            for rows in turns.split(list(record.row_runs), dim=1)
        ]
        return torch.cat(done, dim=1).view(matrix.shape)

    def _over_tp(self, mine: Sequence[int], slices: dict[int, list[torch.Tensor]]) -> None:
        """Bring the matrices of which this rank has slices together, compute, and take them apart."""
        here, bounds = self.sharded.ctx.index("tp"), self._peer_bounds()
        # There: the slices of those that are divided, to the rank that computes; a copy needs no journey.
        out: list[list[torch.Tensor]] = [[] for _ in range(self.tp_size)]
        into: list[list[tuple[int, Box]]] = [[] for _ in range(self.tp_size)]
        for i in mine:
            matrix = self.matrices[i]
            if matrix.copies:
                continue
            for k, part in enumerate(slices[i]):
                if self._counts(matrix.parts[k].record):
                    out[matrix.peer].append(part.reshape(-1))
            if matrix.peer == here:
                for rank in range(self.tp_size):
                    into[rank] += [(i, box) for box in bounds[rank][self._spans[i]] if box[4]]
        received = self._exchange(out, [sum(box[1] * box[3] for _, box in each) for each in into])
        whole = {i: self._empty(i) for i in mine if self.matrices[i].peer == here and self.matrices[i].split}
        at = 0
        for each in into:
            for i, (row, rows, column, columns, _) in each:
                block = received[at : at + rows * columns].view(rows, columns)
                whole[i][row : row + rows, column : column + columns] = block
                at += rows * columns
        del received
        for i in mine:
            if self.matrices[i].peer == here:
                given = slices[i][0] if self.matrices[i].copies else whole[i]
                whole[i] = self._computed(self.matrices[i].record, given)
        # And back, to every rank that holds a slice or a copy.
        out = [[] for _ in range(self.tp_size)]
        sizes = [0] * self.tp_size
        order: list[tuple[int, int, int]] = []
        for i in mine:
            matrix = self.matrices[i]
            for k, part in enumerate(slices[i]):
                sizes[matrix.peer] += part.numel()
                order.append((matrix.peer, i, k))
            if matrix.peer == here:
                for rank in range(self.tp_size):
                    for row, rows, column, columns, _ in bounds[rank][self._spans[i]]:
                        block = whole[i][row : row + rows, column : column + columns]
                        out[rank].append(block.reshape(-1))
        received, at = self._exchange(out, sizes), 0
        for _, i, k in sorted(order, key=lambda one: one[0]):  # by sender; within one as it sent
            shape, numel = slices[i][k].shape, slices[i][k].numel()
            slices[i][k] = received[at : at + numel].view(shape)
            at += numel

    def _counts(self, record: ParameterRecord) -> bool:
        """Return whether this rank's slice is the first of its copies."""
        mesh = self.sharded.ctx.mesh
        copied = any("kv_heads" in shard.axes for shard in record.shards)
        return not copied or mesh.index(self.sharded.ctx.rank, mesh.dims("kv_copies")) == 0

    def _empty(self, i: int) -> torch.Tensor:
        record = self.matrices[i].record
        return torch.empty(record.shape[-2], record.shape[-1], dtype=self.dtype, device=self.device)

    def _peer_bounds(self) -> list[list[Box]]:
        """Return the bounds of all parts on each tensor-parallel rank; asked for once."""
        if not self._bounds:
            rows = [[*part.box, int(self._counts(part.record))] for m in self.matrices for part in m.parts]
            own = torch.tensor(rows, dtype=torch.int64, device=self.device)
            found = [torch.empty_like(own) for _ in range(self.tp_size)]
            dist.all_gather(found, own, group=self.tp)
            self._bounds = [[(b[0], b[1], b[2], b[3], b[4]) for b in each.tolist()] for each in found]
        return self._bounds

    def _exchange(self, out: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> torch.Tensor:
        return exchanged(out, sizes, self.tp, self.dtype, self.device)


def exchanged(
    out: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], group: dist.ProcessGroup | None, dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Send the tensors ``out[r]`` to rank r of a group and return what came, ``sizes[r]`` elements of rank r, in order.
    Collective."""
    counts = [sum(t.numel() for t in each) for each in out]
    send = torch.empty(sum(counts), dtype=dtype, device=device)
    at = 0
    for each in out:
        for tensor in each:
            send[at : at + tensor.numel()] = tensor
            at += tensor.numel()
    received = torch.empty(sum(sizes), dtype=dtype, device=device)
    dist.all_to_all_single(received, send, list(sizes), counts, group=group)
    return received


class _Hop:
    """The exchange among ranks that divide the elements of the same slices; with one such rank, none."""

    def __init__(self, matrices: list[Matrix], dtype: torch.dtype) -> None:
        bucket = matrices[0].parts[0].bucket
        self.matrices, self.dtype = matrices, dtype
        self.group, self.index, self.size = bucket.gather_group, bucket.index, bucket.plan.shards
        self.device = bucket.masters.device

    def plan(self, numbers: list[int]) -> None:
        """Note what goes where, now that the owners are known. ``numbers``: of the matrices among all."""
        self.numbers = numbers
        # Each entry: matrix, part, first and last + 1 element of the part; of mine also the place in the share.
        self.mine: list[list[tuple[int, int, int, int, slice]]] = [[] for _ in range(self.size)]
        self.theirs: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self.size)]
        for m, matrix in enumerate(self.matrices):
            for p, part in enumerate(matrix.parts):
                start = part.bucket.shard_slice.start
                for low, high, at in part.ranges(self.index):
                    place = slice(at - start, at - start + high - low)
                    self.mine[matrix.owner].append((m, p, low - part.low, high - part.low, place))
                if matrix.owner == self.index:
                    for source in range(self.size):
                        self.theirs[source] += [
                            (m, p, low - part.low, high - part.low) for low, high, _ in part.ranges(source)
                        ]

    def gather(self) -> dict[int, list[torch.Tensor]]:
        """Return this rank's slices, [rows, columns] each, of the matrices that it owns, by number."""
        out = [[self._gradient(m, p)[place] for m, p, _, _, place in each] for each in self.mine]
        owned = {m: self._slices(matrix) for m, matrix in enumerate(self.matrices) if matrix.owner == self.index}
        if self.group is None:
            for m, p, low, high, place in self.mine[0]:
                owned[m][p].view(-1)[low:high] = self._gradient(m, p)[place]
        else:
            sizes = [sum(high - low for _, _, low, high in each) for each in self.theirs]
            received, at = exchanged(out, sizes, self.group, self.dtype, self.device), 0
            for each in self.theirs:
                for m, p, low, high in each:
                    owned[m][p].view(-1)[low:high] = received[at : at + high - low]
                    at += high - low
        return {self.numbers[m]: slices for m, slices in owned.items()}

    def scatter(self, slices: Mapping[int, list[torch.Tensor]]) -> None:
        """Write the slices, which the owners have, into the gradients of all."""
        if self.group is None:
            for m, p, low, high, place in self.mine[0]:
                self._gradient(m, p)[place] = slices[self.numbers[m]][p].reshape(-1)[low:high]
            return
        out = [
            [slices[self.numbers[m]][p].reshape(-1)[low:high] for m, p, low, high in each] for each in self.theirs
        ]
        sizes = [sum(high - low for _, _, low, high, _ in each) for each in self.mine]
        received, at = exchanged(out, sizes, self.group, self.dtype, self.device), 0
        for each in self.mine:
            for m, p, low, high, place in each:
                self._gradient(m, p)[place] = received[at : at + high - low]
                at += high - low

    def _gradient(self, m: int, p: int) -> torch.Tensor:
        return self.matrices[m].parts[p].bucket.sums

    def _slices(self, matrix: Matrix) -> list[torch.Tensor]:
        return [torch.empty(part.shape, dtype=self.dtype, device=self.device) for part in matrix.parts]


class MatrixUpdate(HostUpdate):
    """A rule that needs whole matrices: they come together on their owners and go back."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig, rule: MatrixRule, *, seed: int) -> None:
        super().__init__(sharded, config)
        narrow = sharded.buckets[0].weights.dtype in (torch.bfloat16, torch.float16)
        self.rule, self.seed = rule, seed
        self.exchange = MatrixExchange(sharded, rule, torch.bfloat16 if narrow else sharded.master_dtype)
        self._factors: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    @torch.no_grad()
    def _apply(self, lr: float) -> None:
        settings, rule = settings_of(self.config, step=self.steps + 1, lr=lr, seed=self.seed), self.rule
        matrices = [p for p in self.sharded.pieces if rule.takes(p.record)]
        for p in self.sharded.pieces:
            if not rule.takes(p.record):
                rule.update_(p.master, p.gradient, p.state, settings(p.record))
        for p in matrices:
            rule.prepare_(p.gradient, p.state, settings(p.record))
        self.exchange.run()
        for p in matrices:
            self._apply_piece(p, settings(p.record))

    def _apply_piece(self, p: StateShard, settings: UpdateSettings) -> None:
        factor = self.rule.factor(*p.record.shape[-2:])
        if p.record.row_runs:  # of several matrices in one, the factor of each row's
            rows, columns = p.record.local_shape[-2:]
            for r in rectangles(p.start, p.start + p.gradient.numel(), rows, columns):
                r.view(p.gradient).mul_(self._row_factors(p)[r.rows].unsqueeze(1))
            factor = 1.0
        self.rule.apply_(p.master, p.gradient, factor, settings)

    def _row_factors(self, p: StateShard) -> torch.Tensor:
        """Return the factor of each of this rank's rows of a matrix that stands for several; made once."""
        if p.record.place not in self._factors:
            record = p.record
            number = (torch.arange(record.local_shape[-2]) + record.offset[-2]) % sum(record.row_runs)
            of = torch.searchsorted(torch.tensor(record.row_runs).cumsum(0), number, right=True)
            factors = [self.rule.factor(*shape) for shape in shapes_of(record)]
            made = torch.tensor(factors, dtype=p.gradient.dtype)[of].to(p.gradient.device)
            self._factors[record.place] = made
        return self._factors[p.record.place]


@device_update.register
def _update(rule: MatrixRule, asked: UpdateRequest) -> Update:
    return MatrixUpdate(asked.sharded, asked.config, rule, seed=asked.seed)


# Muon: momentum made orthogonal, matrix by matrix; AdamW for what is no matrix of a layer.

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan et al., 2024): the largest slope at 0 with which it stays bounded."""
SMALLEST_NORM = 1e-7
OF_LAYERS = ("layers.", "mtp.")
"""Beginnings of the names of what is within layers: neither embeddings nor the head."""


@dataclass(frozen=True)
class Muon(MatrixRule):
    """Muon (Jordan et al., 2024; Liu et al., arXiv 2502.16982) by the formula of torch.optim.Muon.

    Its matrices are those of linears within layers, adapters and routers among them: each expert's, gate and up apart,
    and of a fused projection each of its parts, such as queries. Embeddings, head, biases and norms are AdamW's.
    """

    options: MuonOptions = field(default_factory=MuonOptions)

    def configured(self, config: OptimizerConfig) -> Muon:
        """Return the rule with ``[optimizer.muon]``."""
        return Muon(config.muon)

    def takes(self, record: ParameterRecord) -> bool:
        """Return whether a parameter is a layer's matrix, or a stack of them."""
        found = record.decay and len(record.shape) > 1 and record.name.startswith(OF_LAYERS)
        return found and not record.name.endswith("convolution.weight")  # taps of channels map no features

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the momentum of a matrix, AdamW's moments of what is none."""
        return (MOMENTUM,) if self.takes(record) else AdamW.KINDS

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        adamw_(master, gradient, state, settings)

    def prepare_(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        momentum = state[MOMENTUM].lerp_(gradient, 1.0 - self.options.momentum)
        if self.options.nesterov:
            gradient.lerp_(momentum, self.options.momentum)
        else:
            gradient.copy_(momentum)

    def transform(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the matrix with its singular values brought near 1."""
        return orthogonalized(matrix, self.options.ns_steps)

    def factor(self, rows: int, columns: int) -> float:
        """Return the factor of ``optimizer.lr`` for a matrix of this shape."""
        if self.options.adjust_lr == "original":
            return self.options.lr_factor * math.sqrt(max(1.0, rows / columns))
        return self.options.lr_factor * 0.2 * math.sqrt(max(rows, columns))

    def apply_(self, master: torch.Tensor, update: torch.Tensor, factor: float, settings: UpdateSettings) -> None:
        decay = settings.lr * self.options.lr_factor * settings.weight_decay
        master.mul_(1.0 - decay).sub_(update, alpha=settings.lr * factor)


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return U V^T of ``matrix`` = U S V^T, roughly (singular values between 0.7 and 1.2), by a Newton-Schulz iteration
    in the matrix's dtype."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def adamw_(
    master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
) -> None:
    """Update a range by AdamW, as torch.optim.AdamW."""
    s = settings
    first = state["exp_avg"].lerp_(gradient, 1.0 - s.beta1)
    second = state["exp_avg_sq"].mul_(s.beta2).addcmul_(gradient, gradient, value=1.0 - s.beta2)
    master.mul_(1.0 - s.lr * s.weight_decay)
    root = (second.sqrt() / math.sqrt(1.0 - s.beta2**s.step)).add_(s.eps)
    master.addcdiv_(first, root, value=-s.lr / (1.0 - s.beta1**s.step))


MUON = Muon()


# LAMB: steps whose length is that of the weights of a layer.

@dataclass(frozen=True)
class LAMB(SumsRule):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2; the norms are not bounded).

    ``u = m̂ / (√v̂ + eps) + weight_decay p``, ``p -= lr · ‖p‖ / ‖u‖ · u``, where a norm is one matrix's, and the ratio 1
    where one of them is 0. Biases and norms take the step without the ratio unless ``lamb.adapts_vectors``.
    """

    options: LAMBOptions = field(default_factory=LAMBOptions)

    def configured(self, config: OptimizerConfig) -> LAMB:
        """Return the rule with ``[optimizer.lamb]``."""
        return LAMB(config.lamb)

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return both moments."""
        return tuple(map(StateKind, AdamW.KINDS))

    def rounds(self, tensor: LogicalTensor, settings: UpdateSettings) -> Rounds:
        t, s = tensor, settings
        weights, updates = t.zeros_of_matrices(), t.zeros_of_matrices()
        first, second = 1.0 - s.beta1**s.step, 1.0 - s.beta2**s.step
        for r in t.rectangles:
            place = t.places[r.place]
            g, p = r.view(place.gradient), r.view(place.master)
            exp_avg = r.view(place.state["exp_avg"]).lerp_(g, 1.0 - s.beta1)
            exp_avg_sq = r.view(place.state["exp_avg_sq"]).mul_(s.beta2).addcmul_(g, g, value=1.0 - s.beta2)
            root = (exp_avg_sq / second).sqrt_().add_(s.eps)
            torch.div(exp_avg / first, root, out=g)
            g.add_(p, alpha=s.weight_decay)
            if t.counts(r):
                weights[r.matrix] += p.square().sum()
                updates[r.matrix] += g.square().sum()
        ratio = torch.ones_like(weights)
        if t.is_matrix or self.options.adapts_vectors:
            yield [t.over_matrices(weights), t.over_matrices(updates)]
            both = (weights > 0) & (updates > 0)
            ratio = torch.where(both, (weights / updates.clamp(min=torch.finfo(t.dtype).tiny)).sqrt(), ratio)
        for r in t.rectangles:
            place = t.places[r.place]
            r.view(place.master).sub_(r.view(place.gradient).mul_(ratio[r.matrix]), alpha=s.lr)


LAMB_RULE = LAMB()
