"""Context of the micro-batch in flight, which the engine gives to the modules, and the sums that they return.

A module finds the :class:`StepContext` in the :class:`StepSlot` that it was built with. It is the same on every stage:
a term of the loss that arises in the middle of the model knows the loss factor and the step's number of tokens,
although labels and masks are on the last stage only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_port.core.dist.collectives import to_device_async
from megatron_port.core.dist.positions import Division, Positions
from megatron_port.core.layers.attention import PackedDocuments
from megatron_port.core.layers.dropout import DropoutStream, SampleKey
from megatron_port.core.registry import PARTS


class AuxiliarySums:
    """Named sums that modules add to during a step: float64 on the device, never read back before the step's end.

    ``names``: of the whole model, the same on every rank, so that one reduction serves all of them.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.values = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self._places = {name: i for i, name in enumerate(self.names)}

    def reset(self) -> None:
        """Start a step: every sum is 0."""
        self.values.zero_()

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar. ValueError: no such name."""
        if name not in self._places:
            raise ValueError(f"no auxiliary sum is named {name!r}; the model has {list(self.names)}")
        self.values[self._places[name]] += value.detach()


@dataclass(frozen=True)
class TallySpec:
    """Shape and dtype of a tally: int64 for exact counts, float64 for sums."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64


class Tallies:
    """Named tensors that modules add to during a step, each rank for its share of the tokens alone.

    :meth:`totals` sums them over all ranks, counts exactly.

    ``specs``: of the whole model, the same on every rank.
    """

    def __init__(self, specs: Mapping[str, TallySpec], device: torch.device) -> None:
        self.specs = dict(specs)
        self._flat = {
            dtype: torch.zeros(
                sum(math.prod(s.shape) for s in specs.values() if s.dtype == dtype), dtype=dtype, device=device
            )
            for dtype in dict.fromkeys(s.dtype for s in specs.values())
        }
        self._values = self._views(self._flat)

    def _views(self, flat: Mapping[torch.dtype, torch.Tensor]) -> dict[str, torch.Tensor]:
        out, ends = {}, dict.fromkeys(flat, 0)
        for name, spec in self.specs.items():
            start = ends[spec.dtype]
            ends[spec.dtype] = start + math.prod(spec.shape)
            out[name] = flat[spec.dtype][start : ends[spec.dtype]].view(spec.shape)
        return out

    def reset(self) -> None:
        """Start a step: everything is 0."""
        for flat in self._flat.values():
            flat.zero_()

    def add(self, name: str, row: int, value: torch.Tensor) -> None:
        """Add to a row of a tally. ValueError: no such name."""
        if name not in self._values:
            raise ValueError(f"no tally is named {name!r}; the model has {list(self._values)}")
        self._values[name][row] += value.detach()

    def totals(self, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
        """Return the sums over all ranks of the group, on every rank, on the device. Collective where there are any."""
        flat = {dtype: values.clone() for dtype, values in self._flat.items()}
        if group is not None:
            for values in flat.values():
                dist.all_reduce(values, group=group)
        return self._views(flat)


@dataclass
class ModuleSums:
    """Sums that modules add to during a step."""

    auxiliary: AuxiliarySums
    tallies: Tallies

    def reset(self) -> None:
        """Start a step: everything is 0."""
        self.auxiliary.reset()
        self.tallies.reset()


def _packed(starts: torch.Tensor, device: torch.device, queries: Positions | None = None) -> PackedDocuments:
    """Return the documents of ``starts`` as kernels of variable lengths take them."""
    found: PackedDocuments = PARTS.function("packed documents")(starts, device, queries)
    return found


def earliest_start(starts: torch.Tensor, position: int) -> int:
    """Return the first position of the document of a position, in the sample where it is the least."""
    return int(starts[:, position].min())


@dataclass(frozen=True, kw_only=True)
class StepShared:
    """Part of the context that all micro-batches of a step share. In a captured step the numbers are float64 scalars on
    the device."""

    loss_factor: float | torch.Tensor = 1.0
    """A sum over this micro-batch's tokens, times this, has the gradient of a mean over the step's tokens, loss scale
    included. Means nothing in evaluation."""
    sample_factor: float | torch.Tensor = 1.0
    """As ``loss_factor``, of a mean over the samples of the step."""
    global_tokens: float | torch.Tensor = 1.0
    """Loss tokens of the step over all replicas; 0 where every label is masked."""
    term_counts: tuple[float, ...] = ()
    """Denominators of the objective's additional terms (``data.objective``), in training; last stage only."""
    auxiliary: AuxiliarySums | None = None
    """None: nobody reads them (evaluation)."""
    tallies: Tallies | None = None
    """None likewise."""


@dataclass(frozen=True, kw_only=True)
class StepContext(StepShared):
    """One micro-batch of a step, as every stage sees it."""

    samples: SampleKey
    document_starts: torch.Tensor | None = None
    """int32 [batch, seq], of the whole sequence on every rank: where in its sample the document of each position
    starts; None: a sample is one document."""
    packed_documents: Callable[..., PackedDocuments] | None = None
    """Gives the same for kernels that take documents as sequences of their own, of all queries or of those given
    (``kernels.packed_documents``); made at the first call."""
    earliest_key: Callable[[int], int] | None = None
    """Gives the first position that the document of a position has in some sample, on the host; None: 0."""
    division: Division | None = None
    """How this micro-batch's sequences are divided between context-parallel ranks; None: as the layout says."""
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The objective's tensors beside labels, on the device; last stage only."""
    recomputing: bool = False
    """The forward pass runs again, for its backward pass."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)
    """Values that the recomputed pass reuses, by the name of their place (:meth:`keep`)."""
    keepers: Mapping[str, Any] = field(default_factory=dict)
    """Objects that note or dictate decisions of modules in training passes (a router's choices), by name."""

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Global numbers of the samples."""
        return self.samples.sample_ids

    def again(self) -> StepContext:
        """Return this context marked as a recomputed forward pass."""
        return replace(self, recomputing=True)

    def keep(self, place: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return ``make()``, or in a recomputed pass what it returned in the first: a decision between alternatives
        must not fall otherwise because a sum was rounded otherwise. It is kept as long as the pass is."""
        if self.recomputing and place in self.kept:
            return self.kept[place]
        self.kept[place] = value = make()
        return value

    def recalled(self, place: str) -> torch.Tensor | None:
        """Return what the first pass kept under this name (:meth:`keep`); None: this is the first pass."""
        return self.kept.get(place) if self.recomputing else None

    def add_tally(self, name: str, row: int, value: torch.Tensor) -> None:
        """Add to a row of a tally, for each micro-batch at its first pass: not while recomputing."""
        if self.tallies is not None and not self.recomputing:
            self.tallies.add(name, row, value)

    def add_auxiliary(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar to the step's sum of that name, once per micro-batch: not while recomputing.

        ``value``: of this replica's tokens, equal on all tensor-parallel ranks. ValueError: no such name.
        """
        if self.auxiliary is not None and not self.recomputing:
            self.auxiliary.add(name, value)


class PassState(NamedTuple):
    """State of a forward pass beside its inputs, restored when it is recomputed."""

    context: StepContext | None
    samples: SampleKey | None
    dropout: bool
    """Whether dropout is on."""

    def again(self) -> PassState:
        """Return the state of the recomputed pass."""
        return self if self.context is None else self._replace(context=self.context.again())


_NONE: Mapping[str, Any] = MappingProxyType({})


class StepSlot:
    """Place where the modules of a model find the context of the micro-batch in flight; handed down while the model is
    built.

    ``stream``: of their dropout, whose samples change with the micro-batch.
    """

    def __init__(self, stream: DropoutStream) -> None:
        self.stream = stream
        self.current: StepContext | None = None
        """None before the first micro-batch, and in inference, which has no engine."""
        self.keepers: dict[str, Any] = {}
        """``StepContext.keepers`` of training passes."""

    @property
    def division(self) -> Division | None:
        """How the sequences in flight are divided between context-parallel ranks; None: as the layout says."""
        return None if self.current is None else self.current.division

    def announce(
        self, step: int, sample_ids: Sequence[int], shared: StepShared = StepShared(), *,  # frozen
        document_starts: torch.Tensor | None = None, division: Division | None = None,
        side: Mapping[str, torch.Tensor] = MappingProxyType({}), keys: torch.Tensor | None = None,
    ) -> None:
        """Set the context of the next forward pass; see :class:`StepContext`.

        ``document_starts``, ``side``: on the host, or of a captured step memory on the device; ``keys``: memory with
        the samples' keys, of a captured step.
        """
        stream, starts = self.stream, document_starts
        samples = stream.set_micro_batch(step, sample_ids, keys)
        self.current = StepContext(
            **vars(shared), samples=samples, division=division, keepers=self.keepers if stream.enabled else _NONE,
            side={name: to_device_async(x, stream.device) for name, x in side.items()},
            document_starts=None if starts is None else to_device_async(starts, stream.device),
            packed_documents=None if starts is None else cache(partial(_packed, starts, stream.device)),
            # Starts of a captured step are on the device, and the host does not wait for them.
            earliest_key=None if starts is None or not starts.is_cpu else cache(partial(earliest_start, starts)),
        )

    def state(self) -> PassState:
        """Return what a forward pass sees now."""
        return PassState(self.current, self.stream.samples, self.stream.enabled)

    @contextmanager
    def use(self, state: PassState) -> Iterator[None]:
        """Run with what an earlier forward pass saw (recompute)."""
        before = self.state()
        self._set(state)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, state: PassState) -> None:
        self.current, self.stream.samples, self.stream.enabled = state
