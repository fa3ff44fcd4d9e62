"""The routes of a run's tokens: written while it trains (``moe.routes``), or taken from another run (``moe.replay``).

A rank computes the routes of its share of the tokens in the layers of its stage; it writes those, and reads those,
whatever layout wrote them. docs/moe.md says what a replay fixes and what not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.agree import agreed
from megatron_port.core.dist.collectives import to_device_async
from megatron_port.core.dist.positions import Division, sequence_partition
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import ConfigError
from megatron_port.core.layers.step import StepContext
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import Ending, LoopHook, LoopState, Session
from megatron_port.ext.telemetry.route_file import (
    FOLDER,
    Experts,
    RankRoutes,
    RouteFolder,
    RouteIdentity,
    RouteWriter,
    Runs,
    Share,
    remove_steps_after,
    write_identity,
)

_LAYER = re.compile(r"(?:layers\.(\d+)|mtp\.(\d+)\.layer)\.mlp\.router\.weight")
"""A layer, or that of a module that predicts a further token: these are numbered after the last."""
_TENSORS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of a number on disk → signed or not, a type with the same bits."""


def identity_of(config: RunConfig, corpora: Sequence[dict[str, Any]]) -> RouteIdentity:
    """Return what routes of this run belong to. ``corpora``: its data's fingerprint."""
    model, moe = config.model, config.model.moe
    return RouteIdentity(
        num_experts=moe.num_experts, top_k=moe.top_k, seq_length=model.seq_length, seed=config.seed, drops=moe.drops,
        layers=tuple(filter(moe.has_experts, range(model.num_layers + model.mtp_layers))),
        corpora=tuple((str(c.get("bin_xxh3") or c["prefix"]), int(c["tokens"])) for c in corpora),
    )


class RunRoutes:
    """Routes of one rank: a :class:`megatron_port.ext.experts.router.RouteKeeper` for the steps of a run.

    Raises:
        ConfigError: ``moe.replay`` is no folder of routes, or of another model or other data; alike on all ranks.
    """

    def __init__(self, session: Session, corpora: Sequence[dict[str, Any]]) -> None:
        self.session, config = session, session.config
        self.identity = identity_of(config, corpora)
        self.folder = run_folder(config) / FOLDER
        self._logs, self._replay = config.moe.routes == "log", None
        if config.moe.replay:
            self._replay = agreed(lambda: self._open(Path(config.moe.replay), config.training.steps))
        self._writer: RouteWriter | None = None
        self._step = -1
        self._samples: tuple[int, ...] = ()
        self._runs: tuple[Runs, ...] = ()
        self._places: dict[int, int] = {}
        self._fixed: Experts | None = None
        self._log: torch.Tensor | None = None
        self._noted = self._batches = 0

    @property
    def enabled(self) -> bool:
        """Whether routes are written or replayed."""
        return self._logs or self._replay is not None

    def _open(self, path: Path, steps: int) -> RouteFolder:
        if self._logs and path.resolve() == self.folder.resolve():
            raise ConfigError(
                f'moe.replay {path} with moe.routes = "log" is the folder that this run writes to; use another name or '
                "output_dir, or switch one of the two off"
            )
        folder = RouteFolder(path)
        folder.check(self.identity, steps, steps)
        return folder

    def attach(self, engine: Engine, step: int) -> None:
        """Begin at a run's start, or after a rewind, with ``step`` steps done. Collective."""
        if not self.enabled:
            return
        config, ctx = self.session.config, self.session.ctx
        agreed(self.close)  # on all ranks, before rank 0 removes what came later
        found = filter(None, (_LAYER.fullmatch(record.name) for record, _ in engine.named_parameters()))
        layers = {int(m[1]) if m[1] else config.model.num_layers + int(m[2]) for m in found}
        partition = sequence_partition(ctx.mesh, ctx.rank, order=config.layout.cp_order, sequence_parallel=True)
        self._partition, self._layers = partition, tuple(sorted(layers))
        self.share = self._share(None)
        if self._replay is not None:
            replay = self._replay
            agreed(lambda: replay.check(self.identity, step + 1, config.training.steps))
        if self._logs:
            agreed(lambda: self._begin_folder(step) if self.session.is_rank_zero else None)
            if layers:
                self._writer = RouteWriter(
                    self.folder, ctx.rank, self.share, guard=self.session.fence.check, warn=self.session.logger.log_any
                )
        engine.step_slot.keepers["routes"] = self

    def _share(self, division: Division | None) -> Share:
        """Return this rank's share of samples that are divided in this way."""
        rows = self._partition.divided(division).residual(self.identity.seq_length)
        return Share(self._layers, tuple((run.start, run.length) for run in rows.runs))

    def _begin_folder(self, step: int) -> None:
        self.session.fence.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_steps_after(self.folder, step)
        write_identity(self.folder, self.identity)

    def begin_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Make ready for a step (counted from 0). Raises DataError: its routes are not in the replayed folder."""
        if not self.enabled:
            return
        self._step, self._samples = step, tuple(i for batch in micro_batches for i in batch.sample_ids)
        self._places = {sample: i for i, sample in enumerate(self._samples)}
        shares = [self._share(batch.division) for batch in micro_batches]
        alike = all(share == self.share for share in shares)
        if self._replay is not None and alike:
            self._fixed = self._replay.read(step + 1, self._samples, self.share)
        elif self._replay is not None:
            parts = [self._replay.read(step + 1, b.sample_ids, s) for b, s in zip(micro_batches, shares)]
            self._fixed = np.concatenate(parts, axis=1)
        own = [share.runs for batch, share in zip(micro_batches, shares) for _ in batch.sample_ids]
        self._runs = () if alike else tuple(own)
        if self._writer is not None:
            shape = (len(self.share.layers), len(self._samples), self.share.rows, self.identity.top_k)
            self._log = torch.empty(
                shape, dtype=_TENSORS[self.identity.dtype.itemsize], pin_memory=self.session.device.is_gpu
            )
            self._noted, self._batches = 0, len(micro_batches)

    def end_step(self) -> None:
        """Give the step's routes to the writer. What is computed after it (replays of the step) is not written."""
        log, self._log = self._log, None
        if log is None or self._writer is None:
            return
        if self._noted != self._batches * len(self.share.layers):
            raise RuntimeError(f"{self._noted} routes were noted of {self._batches} micro-batches in "
                               f"{len(self.share.layers)} layers")
        event = None
        if self.session.device.is_gpu:
            event = torch.cuda.Event()
            event.record()
        self._writer.put(partial(_routes, self._step + 1, self._samples, log, event, self.identity.dtype, self._runs))

    def flush(self) -> None:
        """Wait until the routes of all steps so far are on disk: before a save."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def fixed(self, layer: int, context: StepContext) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the replayed choice on the device, as :class:`RouteKeeper` says. Raises DataError."""
        if self._replay is None or context.samples.step != self._step:
            return None
        at = self.share.layers.index(layer)
        if self._fixed is not None and all(i in self._places for i in context.sample_ids):
            chosen = self._fixed[at, [self._places[i] for i in context.sample_ids]]
        else:  # another replica's samples, in a check of devices
            chosen = self._replay.read(self._step + 1, context.sample_ids, self._share(context.division))[at]
        by_token = chosen.transpose(1, 0, 2).reshape(-1, self.identity.top_k).astype(np.int64)
        numbers = to_device_async(torch.from_numpy(by_token), context.samples.device)
        return numbers % self.identity.num_experts, numbers < self.identity.num_experts

    def note(self, layer: int, context: StepContext, experts: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Keep the choice of a micro-batch, [tokens, k], token (row i, sample j) at i x batch + j."""
        if self._log is None or context.samples.step != self._step:
            return
        first, batch = self._places[context.sample_ids[0]], len(context.sample_ids)
        if context.sample_ids != self._samples[first:first + batch]:
            raise RuntimeError(f"samples {context.sample_ids} are not neighbours in the step's {self._samples}")
        numbers = experts if kept is None else torch.where(kept, experts, experts + self.identity.num_experts)
        by_sample = numbers.view(-1, batch, self.identity.top_k).transpose(0, 1).to(self._log.dtype)
        place = self._log[self.share.layers.index(layer), first:first + batch]
        place.copy_(by_sample.contiguous(), non_blocking=True)
        self._noted += 1


class Routes(LoopHook):
    """Write or replay the routes of each step of a run."""

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        self.routes = RunRoutes(state.session, state.loaders.data_fingerprint)

    def begin(self, *, again: bool = False) -> None:
        """Attach them to the engine; those of later steps are removed."""
        self.routes.attach(self.state.engine, self.state.progress.step)

    def before_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Make room for a step's routes, or read them."""
        self.routes.begin_step(step, micro_batches)

    def after_train_step(self) -> None:
        """Give the step's routes to the writer."""
        self.routes.end_step()

    def before_save(self) -> None:
        """Wait until the routes of all steps so far are on disk."""
        self.routes.flush()

    def close(self, ending: Ending | None) -> None:
        """Write what is left."""
        self.routes.close()


def _routes(
    step: int, samples: tuple[int, ...], log: torch.Tensor, event: torch.cuda.Event | None, dtype: np.dtype[Any],
    runs: tuple[Runs, ...],
) -> RankRoutes:
    """Return a step's routes once the device has delivered them."""
    if event is not None:
        event.synchronize()
    return RankRoutes(step, samples, log.numpy().view(dtype), runs)
