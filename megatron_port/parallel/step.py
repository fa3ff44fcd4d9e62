"""Context of the micro-batch in flight, which the engine gives to the modules, and the sums that they return.

A module finds the :class:`StepContext` as ``stream.current`` (``parallel.random.DropoutStream``, handed down while the
model is built). It is the same on every stage: a term of the loss that arises in the middle of the model knows the
loss factor and the step's number of tokens, although labels and masks are on the last stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from megatron_port.backend.mask import PackedDocuments
from megatron_port.parallel.counter import key_of
from megatron_port.parallel.to_device import to_device_async


def sample_keys(seed: int, step: int, sample_ids: Sequence[int]) -> list[int]:
    """Return the dropout key of each sample of a step, as int64."""
    return [key_of("sample", seed, step, i) for i in sample_ids]


@dataclass(frozen=True)
class SampleKey:
    """Identity of the samples of a micro-batch."""

    seed: int
    step: int
    sample_ids: tuple[int, ...]
    device: torch.device
    filled: torch.Tensor | None = field(default=None, compare=False)
    """The keys, where the engine fills them in for each replay of a recorded step; there are no sample_ids then."""

    @cached_property
    def keys(self) -> torch.Tensor:
        """int64 [batch]: one key per sample, on the device. Made at the first dropout: a model without pays nothing."""
        if self.filled is not None:
            return self.filled
        keys = torch.tensor(sample_keys(self.seed, self.step, self.sample_ids), dtype=torch.int64)
        return to_device_async(keys, self.device)


class AuxiliarySums:
    """Named sums that modules add to during a step: float32 on the device, never read back before the step's end.

    ``names``: of the whole model, the same on every rank, so that one reduction serves all of them.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.values = torch.zeros(len(self.names), dtype=torch.float32, device=device)
        self._places = {name: i for i, name in enumerate(self.names)}

    def reset(self) -> None:
        """Start a step: every sum is 0."""
        self.values.zero_()

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar. ValueError: no such name."""
        if name not in self._places:
            raise ValueError(f"no auxiliary sum is named {name!r}; the model has {list(self.names)}")
        self.values[self._places[name]] += value.detach()


def pack_documents(starts: torch.Tensor, device: torch.device) -> PackedDocuments:
    """Return the documents of ``starts`` (int32 [batch, seq], on the host) as kernels of variable lengths take them."""
    first = (starts == torch.arange(starts.shape[1])).flatten().nonzero().flatten()
    offsets = torch.cat((first, first.new_tensor([starts.numel()]))).to(torch.int32)
    return PackedDocuments(to_device_async(offsets, device), int(offsets.diff().max()))


@dataclass(frozen=True)
class StepContext:
    """One micro-batch of a step, as every stage sees it."""

    samples: SampleKey
    loss_factor: float | torch.Tensor = 1.0
    """A sum over this micro-batch's tokens, times this, has the gradient of a mean over the step's tokens, loss scale
    included. Means nothing in evaluation. In a recorded step, here and below, a float64 scalar on the device."""
    global_tokens: float | torch.Tensor = 1.0
    """Loss tokens of the step over all replicas; 0 where every label is masked."""
    document_starts: torch.Tensor | None = None
    """int32 [batch, seq]: where in its sample the document of each position starts; None: a sample is one document."""
    packed_documents: Callable[[], PackedDocuments] | None = None
    """Gives the same for kernels that take documents as sequences of their own; made at the first call."""
    recomputing: bool = False
    """The forward pass runs again, for its backward pass."""
    auxiliary: AuxiliarySums | None = None
    """None: nobody reads them (evaluation)."""

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Global numbers of the samples."""
        return self.samples.sample_ids

    def again(self) -> StepContext:
        """Return this context marked as a recomputed forward pass."""
        return replace(self, recomputing=True)

    def add_auxiliary(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar to the step's sum of that name, once per micro-batch: not while recomputing.

        ``value``: of this replica's tokens, equal on all tensor-parallel ranks. ValueError: no such name.
        """
        if self.auxiliary is not None and not self.recomputing:
            self.auxiliary.add(name, value)
