"""The native engine's optimizer step where masters and the rule's state live in host memory or on a disk.

The norm, and with it clipping and skipping, comes from the gradients on the device, as without offload. One host
synchronisation brings the clip factor and whether the step is skipped; then the host updates one staged bucket after
another while the next ones are on their way (``memory.offload``): by the own kernels for CPUs, or, by a rule that has
none, in torch's ops. Either way these are the operations of a run without offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple, Protocol

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.native_update import RuleUpdate, SquareNorm, Update, UpdateRequest
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.buckets import Bucket, StateShard, shard_ranges
from megatron_port.core.optim.gradients import step_factor
from megatron_port.core.optim.rules import (
    AdamW,
    BlockRule,
    ElementwiseRule,
    OptimizerRule,
    StateKind,
    StepValues,
    grouped,
)
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.registry import STEP_PARTS
from megatron_port.ext.memory.held import HeldParameters
from megatron_port.ext.memory.offload import Offload, StagedBucket


class DeviceUpdate(Protocol):
    """The update of what stays on the device: ``OwnUpdate`` or ``FusedRuleUpdate``."""

    square_norm: SquareNorm

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates."""

    def apply(self, factor: torch.Tensor, skip: torch.Tensor, *, lr: torch.Tensor) -> None:
        """Apply the gradients times ``factor`` unless ``skip`` is not 0: scalars on the device."""


class PieceRange(NamedTuple):
    """Where a parameter's range is in the flat tensors of its bucket: elements from ``start`` on of the flattened
    local tensor."""

    record: ParameterRecord
    start: int
    span: slice
    """In this rank's share."""
    state: dict[StateKind, slice]


class HostPieces:
    """The pieces of offloaded buckets, as their staged tensors hold them."""

    def __init__(self, sharded: ShardedParameters, offload: Offload) -> None:
        self._places = {id(bucket): self._of(sharded, bucket) for bucket in offload.buckets.values()}
        self._padding = {id(bucket): self._gaps(bucket) for bucket in offload.buckets.values()}

    @staticmethod
    def _of(sharded: ShardedParameters, bucket: Bucket) -> list[PieceRange]:
        out = []
        for f in shard_ranges(bucket.plan, shard=bucket.index):
            at = f.at - bucket.shard_slice.start
            state = {
                kind: r.span for kind, layout in bucket.layouts.items() for r in layout.ranges if r.index == f.index
            }
            out.append(PieceRange(sharded.parameters[f.index][0], f.start, slice(at, at + f.numel), state))
        return out

    def _gaps(self, bucket: Bucket) -> list[slice]:
        """The ranges of this rank's share of a bucket that hold no parameter."""
        end, out = 0, []
        for taken in sorted((place.span for place in self._places[id(bucket)]), key=lambda r: r.start):
            out.append(slice(end, taken.start))
            end = taken.stop
        out.append(slice(end, bucket.shard_slice.stop - bucket.shard_slice.start))
        return [gap for gap in out if gap.start < gap.stop]

    def of(self, staged: StagedBucket) -> list[StateShard]:
        """Return the pieces of a staged bucket. Clears the padding between weights that are about to be written."""
        for gap in self._padding[id(staged.bucket)]:
            staged.weights[gap].zero_()  # else what the staging buffer held before would reach the device
        return [
            StateShard(
                place.record, place.start, staged.weights[place.span], staged.masters[place.span],
                staged.gradient[place.span], {kind.name: staged.state[kind][at] for kind, at in place.state.items()},
            ) for place in self._places[id(staged.bucket)]
        ]


class OffloadedUpdate:
    """An update of offloaded buckets by own kernels, and by ``on_device`` of the others
    (``engine.native_update.Update``)."""

    def __init__(
        self, rule: OptimizerRule, on_device: DeviceUpdate, asked: UpdateRequest, offload: Offload
    ) -> None:
        self.on_device, self.offload, self.config = on_device, offload, asked.config
        self.square_norm: SquareNorm = on_device.square_norm
        self._step = torch.zeros((), dtype=torch.int64)
        self._pieces = HostPieces(asked.sharded, offload)
        self._calls = STEP_PARTS.function("own update on the host")(rule, asked, self._step)

    @property
    def steps(self) -> int:
        """Updates taken."""
        return int(self._step)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self._step.fill_(steps)
        self.on_device.restore(steps)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, values: StepValues, *, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor, skip, norm = step_factor(self.config, square, values, skip)
        self.on_device.apply(factor, skip, lr=values.lr)
        host_factor, skipped = torch.stack([factor, skip]).cpu().unbind()
        if skipped:
            self.offload.discard()
            return norm, skip
        self._step += 1
        lr = torch.tensor(values.host.lr, dtype=torch.float64)
        for staged in self.offload.updates():
            pieces = self._pieces.of(staged)
            for settings, alike in grouped(((p.record, p) for p in pieces), self.config.weight_decay).items():
                for call in self._calls.of(settings, alike):
                    call(lr, host_factor, None)
        return norm, skip


class OffloadedRuleUpdate(RuleUpdate):
    """An update of offloaded buckets and of the others by a rule in torch's ops."""

    def __init__(
        self, sharded: ShardedParameters, offload: Offload, config: OptimizerConfig, on_device: Sequence[StateShard],
        rule: ElementwiseRule | BlockRule, *, seed: int,
    ) -> None:
        super().__init__(sharded, config, rule, seed=seed)
        self.offload, self.pieces, self._host = offload, on_device, HostPieces(sharded, offload)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, values: StepValues, *, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, factor = self._decide(square, values, skip)
        if factor is None:
            self.offload.discard()
            return norm, torch.ones_like(skip)
        self._clip(self.pieces, factor)
        self._update(self.pieces, values.host.lr)
        for staged in self.offload.updates():
            pieces = self._host.of(staged)
            self._clip(pieces, factor)
            self._update(pieces, values.host.lr)
            for piece in pieces:
                piece.weight.copy_(piece.master)
        self._steps += 1
        self.sharded.copy_masters_to_weights()
        return norm, skip


@singledispatch
def host_update(rule: OptimizerRule, asked: UpdateRequest) -> Update:
    """Return the update of offloaded state by a rule: by own kernels, or without one in torch's ops.

    Raises:
        ConfigError: the rule needs more than the elements of one bucket, or is AdamW and the own optimizer kernel is
            not what the device uses.
        EnvironmentFault: the kernel is not built for this machine's CPU.
    """
    raise ConfigError(
        f'offload.optimizer "{_offload(asked).config.optimizer}" with optimizer.name "{asked.config.name}": the host '
        f"updates one bucket after another, and {type(rule).__name__} needs whole matrices or sums over them; use "
        'optimizer.name = "adamw", "lion", "sgd" or "adagrad", or no offload'
    )


@host_update.register
def _adamw(rule: AdamW, asked: UpdateRequest) -> Update:
    if asked.provider != "own":
        raise ConfigError(
            f'offload.optimizer "{_offload(asked).config.optimizer}" updates by the own AdamW kernel, and '
            f'backend.optimizer is "{asked.provider}" here; build the kernels (make kernels), and set '
            'backend.optimizer = "own"'
        )
    made = _by_kernels(rule, asked)
    assert made is not None, "own kernels update by AdamW"
    return made


@host_update.register(ElementwiseRule)
@host_update.register(BlockRule)
def _of_pieces(rule: ElementwiseRule | BlockRule, asked: UpdateRequest) -> Update:
    made = _by_kernels(rule, asked) if asked.provider == "own" else None
    if made is not None:
        return made
    return OffloadedRuleUpdate(
        asked.sharded, _offload(asked), asked.config, _on_device(asked.sharded), rule, seed=asked.seed
    )


def _by_kernels(rule: OptimizerRule, asked: UpdateRequest) -> OffloadedUpdate | None:
    """Return the update by own kernels; None: the rule has none."""
    on_device = STEP_PARTS.function("own update")(rule, asked, _on_device(asked.sharded))
    return None if on_device is None else OffloadedUpdate(rule, on_device, asked, _offload(asked))


def _on_device(sharded: ShardedParameters) -> list[StateShard]:
    offload = _offload_of(sharded)
    return [p for b, p in zip(sharded.shard_buckets, sharded.pieces) if not offload.has(b)]


def _offload(asked: UpdateRequest) -> Offload:
    return _offload_of(asked.sharded)


def _offload_of(sharded: ShardedParameters) -> Offload:
    assert isinstance(sharded, HeldParameters) and sharded.offload is not None, "an update of offloaded state"
    return sharded.offload
