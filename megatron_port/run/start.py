"""What a run begins from: the checkpoints that it may resume, its data, and the engine with its weights."""

from __future__ import annotations

import time

from megatron_port.core.checkpoint.disk import disk_error
from megatron_port.core.checkpoint.lineage import Committer
from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.config.dump import to_toml
from megatron_port.core.data.loader import Loaders, build_loaders
from megatron_port.core.dist.agree import agreed
from megatron_port.core.dist.positions import sequence_partition
from megatron_port.core.io.files import write_bytes
from megatron_port.core.model.activation_sites import layer_choices
from megatron_port.core.model.flops import counted
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import LoopState, Session
from megatron_port.ext.health.numerics import NumericsGuard
from megatron_port.run.build import build_engine
from megatron_port.run.identity import settle
from megatron_port.run.provenance import record_start
from megatron_port.run.state import batch_schedule, find_checkpoints


def open_state(session: Session) -> LoopState:
    """Find what to resume and open the data. Collective; raises PortError alike on all ranks."""
    c = session.config
    checkpoints = find_checkpoints(session)
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


def load_model(state: LoopState) -> None:
    """Build the engine, give it the weights of a checkpoint or first ones, and announce the run. Collective."""
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
        state.engine.record_state()
    _announce(state, time.perf_counter() - started, loaded)


def _announce(state: LoopState, seconds: float, begun_at: Checkpoint | None) -> None:
    c, t, log = state.config, state.ctx.topology, state.session.logger.log
    log(state.session.providers.describe())
    log(
        f"model {c.model.name}: {counted(c.model, c.fine_tuning)}; layout {t.sizes()}"
        f"{', sequence parallel' if c.layout.sequence_parallel and t.tp > 1 else ''}, ZeRO-{c.layout.zero_stage}, "
        f"recompute {'by plan' if c.activations.choices else c.activations.policy}, "
        f"{c.precision.dtype}, engine {c.engine}; model built in {seconds:.1f} s"
    )
    interval = state.engine.state_check_interval
    if interval != 1:
        log(f"state check every {interval} updates (numerics.state_check_interval)" if interval else "no state check")
    agreed(lambda: _claim_folder(state, begun_at) if state.session.is_rank_zero else None)


def _claim_folder(state: LoopState, begun_at: Checkpoint | None) -> None:
    """Write into the run's folder, on rank 0, which run it is of, its configuration, and that it has started."""
    c, folder = state.config, run_folder(state.config)
    manifest, path = (begun_at.manifest, begun_at.path) if begun_at is not None else (None, None)
    try:
        settle(folder, c, manifest, state.session.fence, path=path)
        write_bytes(folder / "config.toml", to_toml(c).encode())
    except OSError as error:
        raise disk_error(error, folder) from error
    record_start(state.session, state.progress.step)
