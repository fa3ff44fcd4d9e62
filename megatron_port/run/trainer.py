"""A run's training: what it begins from, the list of what it does beside its steps, and the loop over them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.checkpoint.shard import disk_error
from megatron_port.core.checkpoint.writer import Committer
from megatron_port.core.config.dump import to_toml
from megatron_port.core.data.loader import Loaders, build_loaders
from megatron_port.core.dist.agree import agreed
from megatron_port.core.dist.positions import sequence_partition
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.files import write_bytes
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.core.registry import LOOP_HOOKS, PARTS, Registry
from megatron_port.core.train.evaluation import Evaluation
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import LoopHook, LoopState, Session
from megatron_port.core.train.loop import Loop, TrainingResult
from megatron_port.ext.health.numerics import NumericsGuard
from megatron_port.ext.memory.sites import layer_choices
from megatron_port.ext.telemetry.flops import counted
from megatron_port.ext.telemetry.reporting import Reporting
from megatron_port.run.build import build_engine, why_not_captured
from megatron_port.run.hooks import Closing, DamageCheck, PeriodicSave, Recovery, SaveInFlight
from megatron_port.run.provenance import record_start, settle
from megatron_port.run.state import batch_schedule, find_checkpoints

if TYPE_CHECKING:
    from megatron_port.run.agent_link import KeptRank


# The list of what a run does beside its steps. A hook's module is imported where the configuration asks for it.
def loop_hooks(state: LoopState, kept: KeptRank | None = None) -> list[LoopHook]:
    """Return the hooks of a run, in the order in which the loop asks them. ``kept``: of a rank that an agent keeps.

    The order matters: damage is known before a step is reported, a step is reported before an anomaly can end the run,
    and a rewind comes before anything that looks at the state.

    Raises:
        ConfigError: a hook cannot do what the configuration asks for; alike on all ranks.
    """
    c, reporting, in_flight = state.config, Reporting(state), SaveInFlight(state, patience=0.0 if kept else 5.0)
    saves = PeriodicSave(state, in_flight)
    return [
        *_activation_planner(state), DamageCheck(state), reporting, Recovery(state), *_rewind(state), in_flight,
        *_routes(state), *_profiler(state), Evaluation(state, reporting.evaluation), *_checks(state),
        *(_plugin(name, state) for name in c.training.hooks),
        saves, *_copies(state, saves, kept), Closing(state, reporting),
    ]


def _activation_planner(state: LoopState) -> Iterator[LoopHook]:
    if state.config.activations.policy in ("plan", "profile"):
        yield _made(PARTS, "activation planner", state)


def _rewind(state: LoopState) -> Iterator[LoopHook]:
    if state.config.numerics.on_anomaly == "rewind":
        from megatron_port.run.rewind import Rewind

        yield Rewind(state)


def _routes(state: LoopState) -> Iterator[LoopHook]:
    moe = state.config.moe
    if moe.routes == "log" or moe.replay:
        from megatron_port.ext.telemetry.routes import Routes

        yield Routes(state)


def _profiler(state: LoopState) -> Iterator[LoopHook]:
    if state.config.telemetry.profile:
        from megatron_port.ext.health.profile import Profiler

        yield Profiler(state)


def _checks(state: LoopState) -> Iterator[LoopHook]:
    if state.config.telemetry.replica_check_interval:
        yield _made(PARTS, "replica check", state)
    if state.config.numerics.replay_interval:
        yield _made(PARTS, "replay check", state)


def _copies(state: LoopState, saves: PeriodicSave, kept: KeptRank | None) -> Iterator[LoopHook]:
    if kept is not None or state.config.checkpoint.memory_interval:
        from megatron_port.run.copying import StateCopying

        yield StateCopying(state, saves, kept)


def _plugin(name: str, state: LoopState) -> LoopHook:
    """Return the hook that a plugin has registered."""
    return _made(LOOP_HOOKS, name, state)


def _made(registry: Registry, name: str, state: LoopState) -> LoopHook:
    hook = registry.function(name)(state)
    if not isinstance(hook, LoopHook):
        raise ConfigError(f"{registry.what} {name!r} makes a {type(hook).__name__}, which is no LoopHook (train.hooks)")
    return hook


# What a run begins from: the checkpoints that it may resume, its data, and the engine with its weights.

def open_state(session: Session, since: int = 0, below: int = -1) -> LoopState:
    """Find what to resume and open the data. Collective; raises PortError alike on all ranks.

    ``since``: epoch in which a job that recovers began to train; ``below``: see ``find_checkpoints``.
    """
    c = session.config
    checkpoints = find_checkpoints(session, since=since, below=below)
    batches = batch_schedule(session, checkpoints)
    return LoopState(
        session=session, config=c, batches=batches, loaders=_load_data(session, batches), numerics=NumericsGuard(c),
        committer=Committer(session.fence), checkpoints=checkpoints,
        choices=layer_choices(c.activations, c.model.num_layers),
    )


def _load_data(session: Session, batches: BatchSchedule) -> Loaders:
    c, ctx = session.config, session.ctx
    return agreed(lambda: build_loaders(
        c, dp_rank=ctx.index("dp"), dp_size=ctx.size("dp"), need_tokens=ctx.is_first_stage,
        need_labels=ctx.is_last_stage, train_samples=batches.samples_before(c.training.steps),
        partition=sequence_partition(ctx.mesh, ctx.rank, order=c.layout.cp_order),
    ), where=str(ctx.coords))


def load_model(state: LoopState, *, recovers: bool = False) -> None:
    """Build the engine, give it the weights of a checkpoint or first ones, and announce the run. Collective.

    ``recovers``: the job has trained before, and lost a rank.
    """
    session, c = state.session, state.config
    started = time.perf_counter()
    fresh, initial = not state.checkpoints, c.checkpoint.initial_weights
    state.engine = build_engine(
        c, state.ctx, session.providers, initialise=fresh and not initial, progress=session.progress
    )
    loaded: Checkpoint | None = None
    if not fresh or initial or c.fine_tuning.enabled or c.distillation.enabled:
        from megatron_port.run.loading import load_weights  # a run from first weights reads none

        loaded = load_weights(state)
    if fresh:
        state.engine.hash_state()
    _announce(state, time.perf_counter() - started, loaded, recovers)


def _announce(state: LoopState, seconds: float, begun_at: Checkpoint | None, recovers: bool) -> None:
    c, t, log = state.config, state.ctx.topology, state.session.logger.log
    log(state.session.providers.describe())
    log(
        f"model {c.model.name}: {counted(c.model, c.fine_tuning)}; layout {t.sizes()}"
        f"{', sequence parallel' if c.layout.sequence_parallel and t.tp > 1 else ''}, ZeRO-{c.layout.zero_stage}, "
        f"recompute {'by plan' if c.activations.choices else c.activations.policy}, "
        f"{_head(c.activations.head_chunk)}{c.precision.dtype}, engine {c.engine}; model built in {seconds:.1f} s"
    )
    if state.ctx.device.type == "cuda":
        why = why_not_captured(c, state.ctx.device, state.session.providers.optimizer)
        log(f"steps are not captured: {why}" if why else "steps are captured, and replayed from the fourth on")
    interval = state.engine.state_check_interval
    if interval != 1:
        log(f"state check every {interval} updates (numerics.state_check_interval)" if interval else "no state check")
    agreed(lambda: _claim_folder(state, begun_at, recovers) if state.session.is_rank_zero else None)


def _head(chunk: int) -> str:
    """Return the part of the announcement about a head in chunks; empty: logits are made at once."""
    return f"head in chunks of {chunk:,} tokens, " if chunk > 0 else ""


def _claim_folder(state: LoopState, begun_at: Checkpoint | None, recovers: bool) -> None:
    """Write into the run's folder, on rank 0, which run it is of, its configuration, and that it has started."""
    c, folder = state.config, run_folder(state.config)
    manifest, path = (begun_at.manifest, begun_at.path) if begun_at is not None else (None, None)
    try:
        settle(folder, c, manifest, state.session.fence, path=path, recovers=recovers)
        write_bytes(folder / "config.toml", to_toml(c).encode())
    except OSError as error:
        raise disk_error(error, folder) from error
    record_start(state.session, state.progress.step)


# A run's training: its state and its hooks (``run.trainer``), and the loop over them.

class Trainer:
    """Training of one rank: built from a session, it holds the engine with the weights that the run begins from."""

    def __init__(self, session: Session, kept: KeptRank | None = None) -> None:
        recovery = kept.recovery if kept is not None else None
        since = recovery.first_epoch if recovery is not None else 0
        self.state: LoopState = open_state(session, since, recovery.below if recovery is not None else -1)
        self.state.hooks = loop_hooks(self.state, kept)
        load_model(self.state, recovers=since > 0)

    def run(self) -> TrainingResult:
        """Train to ``training.steps``; on a signal save and return early."""
        return Loop(self.state).run()
