"""The library: what scripts import from ``megatron_port``, and what the command line is made of.

    from megatron_port import build_engine, build_loaders, load_config, open_session

    config = load_config("models/gpt-tiny", "engine=native", "layout.zero_stage=0", "data.synthetic=true")
    with open_session(config) as session:
        engine, loaders = build_engine(session), build_loaders(session)
        size = session.config.batch.global_batch_size
        for step in range(10):
            result = engine.train_step(loaders.train.step(step * size, size), step=step, lr=3e-4)
            print(step, result.loss)

Started by torchrun or srun, the same lines train on every rank; nothing here knows how many there are.
``import megatron_port`` alone imports none of this: names are looked up when they are first used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig

if TYPE_CHECKING:
    from megatron_port.core.data.loader import Loaders
    from megatron_port.core.dist.rank import ProcessInfo
    from megatron_port.core.engine.api import Engine
    from megatron_port.core.model.decoder import GPTStage
    from megatron_port.core.train.hooks import Session
    from megatron_port.core.train.loop import TrainingResult
    from megatron_port.run.agent_link import KeptRank


def load_config(file: str | Path | Sequence[str | Path] | None = None, *overrides: str) -> RunConfig:
    """Return a run's configuration from TOML files and ``"a.b=VALUE"`` overrides, as ``megatron-port train`` reads it.

    ``file``: a path, the name of a shipped file ("runs/quickstart", "models/gpt-22b"), several of them (later ones
    win), or None for the defaults alone. Cross-field checks come with :func:`open_session`, which knows the ranks.

    Raises:
        ConfigError: a file or value that cannot be read, or a name that does not exist.
    """
    return load(file, list(overrides)).config


def open_session(
    config: RunConfig, info: ProcessInfo | None = None, *, quiet: bool = False, writes: bool = False
) -> AbstractContextManager[Session]:
    """Meet the other ranks, choose device and providers, make the groups; leaving it takes them down.

    ``info``: who this rank is; None: as torchrun, srun or nobody (one process) says.
    ``writes``: the run's folder will be written, so rank 0 tries that before the ranks meet.
    ``session.config`` is the configuration with every derived value filled in. One session a process at a time.

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFault: launcher, network, device, output folder, or a number of ranks that the layout cannot use.
    """
    from megatron_port.run import session
    from megatron_port.run.discovery import discover

    return session.open_session(config, info or discover(), quiet=quiet, writes=writes)


def build_model(session: Session) -> list[GPTStage]:
    """Return this rank's part of the model: a ``torch.nn.Module`` for each of its chunks (one, unless the schedule is
    interleaved) whose parameters are allocated and not yet set.

    Forward takes token ids [batch, seq] on the first stage, and gives logits [seq, batch, vocab / tp] on the last.
    :func:`build_engine` makes its own.
    """
    from megatron_port.core.layers.dropout import DropoutStream
    from megatron_port.core.layers.step import StepSlot
    from megatron_port.run import build as assemble

    stream = DropoutStream(session.config.seed, session.ctx.device)
    return assemble.build_model(session.config, session.ctx, session.providers, StepSlot(stream))


def build_engine(session: Session, *, initialise: bool = True) -> Engine:
    """Return this rank's model and optimizer in the run's engine, with initial weights.

    ``initialise``: False where ``engine.load_state`` or ``load_weights`` will set them.
    """
    from megatron_port.run import build as assemble

    return assemble.build_engine(
        session.config, session.ctx, session.providers, initialise=initialise, progress=session.progress
    )


def build_loaders(session: Session) -> Loaders:
    """Return training, validation and test data of this rank's replica and stage.

    ``loaders.train.step(first_sample, global_batch)`` gives the micro-batches of a step: it is a function of the
    sample number, so continuing anywhere needs no state.

    Raises:
        DataError: a corpus that is missing, damaged, too small or of another tokenizer.
    """
    from megatron_port.core.data import loader
    from megatron_port.core.dist.positions import sequence_partition
    from megatron_port.core.optim.schedules import BatchSchedule

    ctx, config = session.ctx, session.config
    return loader.build_loaders(
        config, dp_rank=ctx.index("dp"), dp_size=ctx.size("dp"), need_tokens=ctx.is_first_stage,
        need_labels=ctx.is_last_stage,
        train_samples=BatchSchedule(config.batch, ctx.size("dp")).samples_before(config.training.steps),
        partition=sequence_partition(ctx.mesh, ctx.rank, order=config.layout.cp_order),
    )


def check_memory(config: RunConfig, world_size: int | None) -> str:
    """Return the planner's message where the run cannot fit and ``launch.memory_check`` only warns; otherwise empty.

    Raises:
        ConfigError: it cannot fit, and ``launch.memory_check`` is "stop".
    """
    if config.launch.memory_check == "off" or config.cluster.memory_gb <= 0:  # the planner is large
        return ""
    from megatron_port.core.errors import ConfigError
    from megatron_port.tools.plan.guard import memory_problem

    found = memory_problem(config, world_size)
    if found and config.launch.memory_check == "stop":
        raise ConfigError(found)
    return found


def _warnings(config: RunConfig, world_size: int) -> list[str]:
    """Return what a run should be warned of before it starts. Raises ConfigError as :func:`check_memory` does."""
    from megatron_port.run.elastic import starved_stages

    found = [check_memory(config, world_size), starved_stages(config, world_size)]
    if config.model.family != "auto":
        from megatron_port.tools.interop.hf_config import another_family

        found.append(another_family(config.model))
    return [warning for warning in found if warning]


def run_training(
    config: RunConfig, info: ProcessInfo | None = None, *, kept: KeptRank | None = None
) -> TrainingResult:
    """Run one rank's part of a run: resume, train, evaluate, save, report; what ``megatron-port train`` calls.

    Signals make it save and return early; ``outcome.exit_code`` says how it ended. On failure the run's folder gets
    the first rank's message for the job script.

    Args:
        kept: of a rank that an agent keeps (``run.recovery``): that a peer was lost is then no failure of the run.

    Raises:
        PortError: see ``megatron_port.core.errors``; the same on every rank where it concerns all.
    """
    from functools import partial

    from megatron_port.core.dist.process import block_signals

    block_signals()
    from megatron_port.core.errors import LauncherFault, PeerLost, StateDamaged
    from megatron_port.core.train.folders import run_folder
    from megatron_port.run.discovery import discover
    from megatron_port.run.launchers import attempt_name
    from megatron_port.run.leasing import leased_session
    from megatron_port.run.peer_failure import explain_peer_failure
    from megatron_port.run.provenance import record_failure_event
    from megatron_port.run.run_files import record_failure
    from megatron_port.run.session import open_session
    from megatron_port.run.trainer import Trainer
    from megatron_port.run.watch.client import watch_ranks

    info = info or discover()
    try:
        if config.launch.when_lost == "replace" and kept is None:
            raise LauncherFault(
                f'launch.when_lost "replace" needs an agent that keeps the ranks, and {info.launcher} started this '
                "process; start one process a node, each `megatron-port train RUN --nproc N`, or set launch.when_lost "
                '= "stop" and let launch.when_failed queue the job again'
            )
        for warning in _warnings(config, info.world_size):
            if info.rank == 0:
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        around = partial(watch_ranks, agent=kept.link) if kept else watch_ranks
        opening = open_session(config, info, around=around, writes=True, replaced=kept is not None)
        with opening as opened, leased_session(opened) as session:
            if kept is not None:
                kept.met_at = time.time()
            try:
                return Trainer(session, kept).run()
            except Exception as error:
                passing = explain_peer_failure(error, info) is not None or isinstance(error, StateDamaged)
                if kept is None or not passing:
                    record_failure_event(session, error)
                raise
    except BaseException as error:
        lost = isinstance(error, PeerLost)
        if kept and isinstance(error, Exception):
            raise  # it may be recovered from: run.recovery records it where the run ends
        record_failure(run_folder(config), attempt_name(), info.rank, error, lost_peer=lost)
        raise
