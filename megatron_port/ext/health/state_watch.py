"""Checks of gradients and state in the native engine's steps: what looks where the core's ``StateWatch`` does not."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.optim.buckets import Bucket
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.optim.state_watch import Damage, StateEntry, StateTensor, StateWatch
from megatron_port.ext.health.gradient_check import GradientCheck
from megatron_port.ext.health.state_check import check_of, hashes_of


class CheckedState(StateWatch):
    """Hashes of one rank's state and checks of its reduced gradients, at the interval that a run asks for.

    It keeps no ``ShardedParameters``, which keep it: a cycle of references would keep process groups alive.
    """

    def __init__(self, config: RunConfig, sharded: ShardedParameters) -> None:
        self._sharded = weakref.ref(sharded)
        self._entries = {id(bucket): _entries(sharded, bucket, bucket.shard_slice) for bucket in sharded.buckets}
        """By bucket: where its parameters are in this rank's part."""
        self.state = check_of(config, sharded.ctx)
        self.interval = self.state.interval
        self.gradients = GradientCheck(
            sharded.trained, self._entries, sharded.ctx, dtype=sharded.reduce_dtype, interval=self.interval,
            differing=self.state.differing, hashes=hashes_of(config.backend),
        )

    @property
    def differing(self) -> torch.Tensor:
        """Rows and copies that differed in any check so far, an int64 scalar on the device."""
        return self.state.differing

    @property
    def _parameters(self) -> ShardedParameters:
        sharded = self._sharded()
        assert sharded is not None, "a check after its engine's end"
        return sharded

    # -- gradients ---------------------------------------------------------------------------------------------------

    def begin(self, *, early: bool) -> None:
        """Begin a step; ``early`` False: a replay, which changes nothing."""
        self.gradients.begin(early=early)

    def starting(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Take the rows' sums of gradients that are about to be reduced to shards."""
        self.gradients.starting(bucket, flat)

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """Hash reduced gradients that nobody may change until they are released."""
        self.gradients.record(buckets)

    def release(self, buckets: Sequence[Bucket]) -> None:
        """Compare held gradients with their hashes."""
        self.gradients.release(buckets)

    def reduced(self, buckets: Sequence[Bucket]) -> None:
        """Check the first sums of a step, all of which are complete, before any further ones."""
        self.gradients.reduced(buckets)

    def verify_gradients(self) -> None:
        """Release everything and compare copies over their groups: right before the update. Collective."""
        self.gradients.verify()

    def replays(self) -> None:
        """Note that steps are captured and replayed."""
        self.gradients.captured = True

    def verify_replayed(self) -> None:
        """Compare copies after the passes of a replayed step. Collective."""
        self.gradients.verify_replayed()

    # -- state -------------------------------------------------------------------------------------------------------

    def verify_state(self) -> torch.Tensor:
        """Compare the state with its hashes after the last update."""
        if self.state.recorded:
            self._parameters.wait_for_state()
            self.state.verify()
        return self.state.differing

    def hash_state(self, *, gathering: bool = False) -> None:
        """Hash what this rank owns after an update, its shard of the weights too: before they are gathered, so that
        what changes in between is not taken for the update's result. ``gathering``: other shards are hashed by
        :meth:`gathered`; else all weights are here.

        What changes between the update's write and this read, the next work on the same stream, is not found. That
        would take hashes of what the update's kernels hold in registers, whose blocks take chunks of tensors and not
        rows of 16 KiB: sums of atomics, on every device and for every rule.
        """
        sharded = self._parameters
        if self.state.begin():
            sharded.wait_for_state()
            self.state.record(self._owned_tensors(sharded))
            if self.gradients.captured and not gathering:  # a captured step gathers weights at its beginning
                sharded.wait()
            for bucket in sharded.buckets:
                # Experts that no other rank holds are not gathered.
                partly = gathering and not bucket.plan.frozen and bucket.shards > 1
                self.state.record([self._shard_tensor(bucket) if partly else self._weight_tensor(sharded, bucket)])

    def gathered(self, bucket: Bucket) -> None:
        """Hash the other replicas' shards of a bucket's weights; those of a captured step with the rest of the state,
        once all are gathered."""
        sharded, own = self._sharded(), bucket.shard_slice
        if self.state.recording and not self.gradients.captured and sharded is not None:
            parts = (slice(0, own.start), slice(own.stop, bucket.plan.numel))
            self.state.record(
                StateTensor("weight", bucket.weights[part], _entries(sharded, bucket, part)) for part in parts)

    def damage(self) -> Damage | None:
        """Return what changed though no update did it, or what is wrong with reduced gradients; None: nothing."""
        reduced = self.gradients.damage()  # first: the ranks whose copies differ meet
        return self.state.damage() or reduced

    def _weight_tensor(self, sharded: ShardedParameters, bucket: Bucket) -> StateTensor:
        """The weights of a bucket that stay from one step to the next: all, including other replicas' shards, or, where
        they are not whole then, this rank's shard."""
        if not sharded.whole:
            return self._shard_tensor(bucket)
        return StateTensor("weight", bucket.weights, _entries(sharded, bucket, slice(0, bucket.plan.numel)))

    def _shard_tensor(self, bucket: Bucket) -> StateTensor:
        return StateTensor("weight", bucket.shard, self._entries[id(bucket)])

    def _owned_tensors(self, sharded: ShardedParameters) -> Iterator[StateTensor]:
        """This rank's masters (where they are not the weights) and state, which is settled."""
        for bucket in sharded.trained:
            if bucket.masters is not bucket.shard:
                yield StateTensor("fp32 master", bucket.masters, self._entries[id(bucket)])
            for kind, flat in bucket.state.items():
                ranges = bucket.layouts[kind].ranges
                named = [StateEntry(r.at, r.numel, sharded.parameters[r.index][0].name, r.start) for r in ranges]
                yield StateTensor(kind.name, flat, named)


def _entries(sharded: ShardedParameters, bucket: Bucket, part: slice) -> list[StateEntry]:
    """Where a bucket's parameters are in a part of it."""
    found = []
    for slot in bucket.plan.slots:
        low, high = max(slot.start, part.start), min(slot.start + slot.numel, part.stop)
        if low < high:
            name = sharded.parameters[slot.index][0].name
            found.append(StateEntry(low - part.start, high - low, name, low - slot.start))
    return found
