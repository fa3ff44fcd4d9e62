"""The module of mixers with a state: what :class:`RecurrentSpec` states, on any layout.

Heads are divided over tensor-parallel ranks. Context-parallel ranks hold runs of positions: before a run's convolution
come the last rows of the run before it, and before its recurrence a state. Each rank computes what its runs do to
a state, all gather that, and each composes it for its own runs. A document resets both at its first position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_port.core.dist.collectives import all_reduce_sum, enter_region
from megatron_port.core.dist.positions import Positions, Run, SequencePartition
from megatron_port.core.layers.fused import upcast
from megatron_port.core.model.build import BuildContext
from megatron_port.core.registry import PARTS
from megatron_port.ext.mixers.projection_norm import split_rms_norm
from megatron_port.ext.mixers.recurrence import Operands, convolve, in_chunks, in_steps, passage, passed, zero_state
from megatron_port.ext.mixers.recurrent_spec import RecurrentSpec, Rows


class Memory(NamedTuple):
    """Memory of earlier tokens, of one sequence each."""

    rows: torch.Tensor
    """[kernel - 1, batch, channels]: the last rows that the convolution has read."""
    state: torch.Tensor | None
    """[batch, heads, key, value]"""


@dataclass(frozen=True)
class _Run:
    """Neighbouring positions, and where their documents begin."""

    run: Run
    reach: torch.Tensor | None = None
    """int [n, batch]: positions of the same document before each; None: all are one document."""
    used: torch.Tensor | None = None
    """bool [batch, n]: the others change no state; None: all are used."""

    def part(self, start: int, length: int) -> _Run:
        """Return some of the positions."""
        if length == self.run.length:
            return self
        stop = start + length
        return _Run(
            Run(self.run.start + start, length), None if self.reach is None else self.reach[start:stop],
            None if self.used is None else self.used[:, start:stop],
        )

    def operands(self, all: Operands) -> Operands:
        """Return the operands of these positions, with the documents' starts."""
        starts = None if self.reach is None else (self.reach == 0).T
        if self.used is None:
            return replace(all, starts=starts)
        no = ~self.used[:, None]  # keys, rates and decays of 0 leave a state as it is
        return replace(
            all, starts=starts, keys=all.keys.masked_fill(no[..., None], 0.0),
            decay=all.decays.masked_fill(no[..., None], 0.0),
            rate=None if all.rate is None else all.rate.masked_fill(no, 0.0),
        )


class _Tied(torch.autograd.Function):
    """x, whose gradient gives ``also`` a gradient of zeros: so all ranks take part in the sum of its gradients,
    although the one that has the beginning of the sequence uses nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, also: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(also)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


class Recurrent(nn.Module):
    """A mixer with a state, [seq(/tp), batch, hidden] → same shape.

    Between its projections, in fp32 (or fp64), and computed again in the backward pass: convolution, recurrence, gate.
    """

    def __init__(self, layer: str, spec: RecurrentSpec, build: BuildContext) -> None:
        super().__init__()
        self.name, self.spec, self.step = f"{layer}.attention", spec, build.step
        self.partition, self.group = build.partition, build.ctx.over("cp")
        self.epsilon = build.model.recurrent.norm_epsilon or build.model.norm_epsilon
        self.ranks, self.tp_group, self.sequence_parallel = (
            build.ctx.size("tp"), build.ctx.over("tp"), build.sequence_parallel
        )
        self.units = spec.units // self.ranks
        self.convolution = nn.ParameterList(build.divided(p, layer) for p in spec.convolution)
        self.own = nn.ParameterDict({name: build.divided(p, layer) for name, p in spec.own.items()})
        self.packed = build.column(layer, spec.packed)
        self.shared = None if spec.shared is None else build.whole(layer, spec.shared)
        self.output = build.row(layer, spec.output)
        self.wide = torch.promote_types(build.dtype, torch.float32)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's units, and behind them those that all units share."""
        assert self.shared is not None
        packed = self.packed(x)
        # Units on all ranks add to the gradient of what they share.
        shared = enter_region(self.shared(x), self.tp_group, self.sequence_parallel)
        return torch.cat((packed, shared), dim=-1)

    def mix(self, packed: torch.Tensor) -> torch.Tensor:
        """Return what the output projection reads, from the projection [held positions, batch, units/tp · rows, and
        what they share]."""
        partition = self.partition.divided(self.step.division)
        seq = partition.seq_length(packed.shape[0])
        runs = [self._documents(run) for run in partition.held(seq).runs]
        rows = list(packed.split([run.run.length for run in runs])) if len(runs) > 1 else [packed]
        befores = self._befores(rows, partition, seq)
        states: list[torch.Tensor | None] = [None] * len(runs)
        if self.group is not None and self.spec.heads:
            states, _ = self._states(rows, befores, runs, partition, seq)
        out = [part for given in zip(rows, befores, states, runs, strict=True) for part in self._of_run(*given)[0]]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _documents(self, run: Run) -> _Run:
        context = self.step.current
        if context is None or context.document_starts is None:
            return _Run(run)
        starts = context.document_starts[:, run.start : run.start + run.length].T
        positions = torch.arange(run.start, run.start + run.length, dtype=starts.dtype, device=starts.device)
        return _Run(run, positions[:, None] - starts)

    def _again(self, function: Callable[..., Any], *inputs: object) -> Any:
        """Return ``function(*inputs)``, computed again in the backward pass."""
        if not torch.is_grad_enabled():
            return function(*inputs)
        return PARTS.function("activation recompute")(function, *inputs, step=self.step)

    # ------------------------------------------------------------------------------------------- one run

    def _split(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what the convolution reads, [n, batch, channels], the plain rows, [n, batch, units, plain], and the
        plain ones that units share."""
        spec = self.spec
        rows, shared = packed.split((packed.shape[-1] - spec.shared_rows, spec.shared_rows), dim=-1)
        convolved, plain = spec.inputs(rows.unflatten(-1, (self.units, -1)), self.wide)
        channels = convolved.flatten(-2)
        if spec.shared_convolved:
            channels = torch.cat((channels, shared[..., : spec.shared_convolved]), dim=-1)
        return channels, plain, shared[..., spec.shared_convolved :]

    def _prepared(
        self, packed: torch.Tensor, before: torch.Tensor | None, run: _Run
    ) -> tuple[Rows, dict[str, torch.Tensor], Operands | None]:
        """Return the mixer's rows, its own parameters, and the recurrence's operands."""
        mine, plain, shared = (x.to(self.wide) for x in self._split(packed))
        kinds = 1 + self.spec.convolution_bias
        ahead = mine[:0] if before is None else before.to(self.wide)
        if lacking := self.spec.kernel - 1 - len(ahead):  # the sequence begins here
            ahead = torch.cat((mine.new_zeros(lacking, *mine.shape[1:]), ahead))
        weights = [upcast(p) for p in self.convolution]
        bias = torch.cat(weights[1::kinds]) if self.spec.convolution_bias else None
        found = convolve(mine, ahead, self.spec.taps(weights[::kinds]), bias, run.reach)
        together = self.spec.shared_convolved
        convolved, common = found.split((found.shape[-1] - together, together), dim=-1)
        rows = Rows(convolved.unflatten(-1, (self.units, -1)), plain, torch.cat((common, shared), dim=-1))
        own = {name: upcast(p) for name, p in self.own.items()}
        operands = self.spec.operands(rows, own)
        return rows, own, None if operands is None else run.operands(operands)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, *, over_ranks: bool = False) -> torch.Tensor:
        if over_ranks and self.ranks > 1:
            count = x.shape[-1] * self.ranks
            return split_rms_norm(x, weight, self.epsilon, count=count, group=self.tp_group)
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * weight

    def _of_run(
        self, rows: torch.Tensor, before: torch.Tensor | None, state: torch.Tensor | None, run: _Run
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the mixed rows of a run by segments, each [n, batch, features/tp] in the dtype of ``rows``, and the
        state behind it."""
        out = []
        for part, ahead, segment in self._segments(rows, before, run):
            mixed, state = self._again(self._mixed, part, ahead, state, segment)
            out.append(mixed)
        return out, state

    def _segments(
        self, rows: torch.Tensor, before: torch.Tensor | None, run: _Run
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, _Run]]:
        """Yield the rows of each segment of a run, those before it that the convolution reads, its positions."""
        taps, size = self.spec.kernel - 1, self.spec.segment
        parts = rows.split(size) if len(rows) > size else (rows,)
        for i, part in enumerate(parts):
            yield part, before, run.part(i * size, len(part))
            before = self._split(part[len(part) - taps :])[0] if taps else None

    def _mixed(
        self, packed: torch.Tensor, before: torch.Tensor | None, state: torch.Tensor | None, run: _Run
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the mixed rows of a segment, and the state behind it."""
        rows, own, operands = self._prepared(packed, before, run)
        mixed = None
        if operands is not None:
            state = zero_state(operands) if state is None else state
            mixed, state = in_chunks(operands, state, chunk=self.spec.chunk)
            mixed = mixed.movedim(2, 0)
        return self.spec.result(mixed, rows, own, self._norm).to(packed.dtype), state

    def _passage(self, rows: torch.Tensor, before: torch.Tensor | None, run: _Run) -> torch.Tensor:
        """Return what a run does to the state that comes into it (``recurrence.passage``)."""
        found: torch.Tensor | None = None
        for given in self._segments(rows, before, run):
            found = self._again(self._passage_of, *given, found)
        assert found is not None
        return found

    def _passage_of(
        self, rows: torch.Tensor, before: torch.Tensor | None, run: _Run, earlier: torch.Tensor | None
    ) -> torch.Tensor:
        operands = self._prepared(rows, before, run)[-1]
        assert operands is not None
        return passage(operands, earlier, chunk=self.spec.chunk)

    # ---------------------------------------------------------------------------- runs of a divided sequence

    def _befores(
        self, rows: list[torch.Tensor], partition: SequencePartition, seq: int
    ) -> list[torch.Tensor | None]:
        """Return the rows before each run's that its convolution reads, [kernel - 1, batch, channels]; None: zeros.

        ValueError: a run is shorter than these.
        """
        taps = self.spec.kernel - 1
        if self.group is None or not taps:
            return [None] * len(rows)
        if min(len(x) for x in rows) < taps:
            raise ValueError(f"{self.name}: {min(map(len, rows))} neighbouring positions, and the convolution reads "
                             f"{taps} before each")
        last = [self._split(x[-taps:])[0].contiguous() for x in rows]
        every, mine = self._gathered(last, rows, partition, seq)
        return [every[i - 1] if i else None for i in mine]

    def _states(
        self, rows: list[torch.Tensor], befores: Sequence[torch.Tensor | None], runs: Sequence[_Run],
        partition: SequencePartition, seq: int,
    ) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """Return the state before each of this rank's runs, and the one behind the sequence."""
        own = [self._passage(*given) for given in zip(rows, befores, runs, strict=True)]
        every, mine = self._gathered(own, rows, partition, seq)
        states = passed(every, self.spec.value_size)
        return [states[i] for i in mine], states[-1]

    def _gathered(
        self, own: Sequence[torch.Tensor], rows: list[torch.Tensor], partition: SequencePartition, seq: int
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return a tensor of each run of the sequence, in its order, and which are this rank's. Gradients are summed,
        for which the first of ``rows`` is replaced."""
        division = partition.division
        by_rank = [division.held(rank, seq).runs for rank in range(division.ranks)]
        most = max(map(len, by_rank))
        padded = [*own, *(torch.zeros_like(own[0]) for _ in range(most - len(own)))]
        every = enter_region(torch.stack(padded), self.group, True)
        rows[0] = _Tied.apply(rows[0], every)  # type: ignore[no-untyped-call]
        order = sorted((run.start, rank, i) for rank, runs in enumerate(by_rank) for i, run in enumerate(runs))
        place = {(rank, i): number for number, (_, rank, i) in enumerate(order)}
        return [every[rank * most + i] for _, rank, i in order], [place[partition.rank, i] for i in range(len(own))]

    # ------------------------------------------------------------------------------------------- generation

    def continued(
        self, packed: torch.Tensor, memory: Memory | None, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, Memory]:
        """Return what :meth:`mix` does, and the memory behind the last token of each sequence.

        Args:
            packed: of one token of each sequence; or, without ``memory``, of this rank's positions of whole sequences.
            memory: of the tokens before.
            lengths: int64 [batch]: tokens of each sequence; what is behind them is padding. None: one.
        """
        if memory is not None:
            return self._next(packed, memory)
        assert lengths is not None
        partition = self.partition
        seq = partition.seq_length(packed.shape[0])
        positions = partition.held(seq)
        used = positions.index(packed.device) < lengths[:, None]
        sizes = [run.length for run in positions.runs]
        runs = [_Run(run, used=part) for run, part in zip(positions.runs, used.split(sizes, dim=1), strict=True)]
        rows = list(packed.split(sizes))
        befores = self._befores(rows, partition, seq)
        states: list[torch.Tensor | None] = [None] * len(runs)
        state = None
        if self.spec.heads:
            states, state = self._states(rows, befores, runs, partition, seq)
        out = [part for given in zip(rows, befores, states, runs, strict=True) for part in self._of_run(*given)[0]]
        return torch.cat(out), Memory(self._last_rows(packed, positions, lengths), state)

    def _next(self, packed: torch.Tensor, memory: Memory) -> tuple[torch.Tensor, Memory]:
        """Return the mixed row of one token of each sequence, and the memory behind it."""
        rows, own, operands = self._prepared(packed, memory.rows, _Run(Run(0, 1)))
        mixed, state = None, memory.state
        if operands is not None:
            assert state is not None
            mixed, state = in_steps(operands, state)
            mixed = mixed.movedim(2, 0)
        out = self.spec.result(mixed, rows, own, self._norm).to(packed.dtype)
        return out, Memory(torch.cat((memory.rows, self._split(packed)[0]))[1:], state)

    def _last_rows(self, packed: torch.Tensor, positions: Positions, lengths: torch.Tensor) -> torch.Tensor:
        """Return the last rows of each sequence that the convolution reads, [kernel - 1, batch, channels]."""
        rows, taps = self._split(packed)[0], self.spec.kernel - 1
        wanted = lengths - torch.arange(taps, 0, -1, device=packed.device)[:, None]  # [kernel - 1, batch]
        index = positions.index(packed.device)
        order = index.argsort()
        place = order[torch.searchsorted(index[order], wanted).clamp(max=len(index) - 1)]
        found = rows.gather(0, place[..., None].expand(-1, -1, rows.shape[-1]))
        return all_reduce_sum(found.masked_fill((index[place] != wanted)[..., None], 0.0), self.group)
