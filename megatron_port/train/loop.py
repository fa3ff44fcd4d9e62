"""The training loop. Read it top to bottom: resume, then step, report, evaluate, save, until done or told to stop."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_port.checkpoint.disk import disk_error
from megatron_port.checkpoint.lineage import Committer
from megatron_port.checkpoint.reader import Checkpoint
from megatron_port.config.dump import to_toml
from megatron_port.data.document_length import document_length
from megatron_port.data.loader import Loaders, build_loaders
from megatron_port.engine.api import Engine, EvalResult, StepResult
from megatron_port.errors import NumericsError
from megatron_port.health.anomaly import REPRODUCIBLE, Anomaly, investigate
from megatron_port.health.numerics import NumericsGuard
from megatron_port.health.replay import check_replay_settings, replay_on_neighbour
from megatron_port.health.replicas import check_replicas
from megatron_port.launch.outcome import FINISHED, SAVED, AttemptOutcome, write_outcome
from megatron_port.model.distilled import distillation_means
from megatron_port.model.flops import counted, hardware_flops, model_flops
from megatron_port.model.multi_token import further_loss
from megatron_port.model.preference import reward_means
from megatron_port.optim.schedules import learning_rate
from megatron_port.optim.state_check import Damage
from megatron_port.parallel.positions import sequence_partition
from megatron_port.runtime.agreement import agree, agreed
from megatron_port.runtime.atomic import write_bytes
from megatron_port.runtime.job import attempt_name
from megatron_port.runtime.lease import LeaseLost
from megatron_port.runtime.memory import peak_resident_bytes
from megatron_port.runtime.progress import DATA, EVALUATE, IDLE, REDUCE, SAVE, START
from megatron_port.runtime.signals import EXIT_CODES, LEVELS, StopRequest, block_signals, name_of
from megatron_port.session.assemble import build_engine
from megatron_port.session.changes import changes_since, check_batch, check_data_fingerprint
from megatron_port.session.folders import run_folder
from megatron_port.session.identity import settle
from megatron_port.session.provenance import record_event, record_start
from megatron_port.session.session import Session
from megatron_port.session.teacher import teacher_identity
from megatron_port.session.weights import base_identity, carry_companions, load_initial
from megatron_port.telemetry.sinks import Telemetry
from megatron_port.train.activations import ActivationPlanner
from megatron_port.train.closing import closing_lines, finished_line
from megatron_port.train.profile import StepProfiler
from megatron_port.train.routes import RunRoutes
from megatron_port.train.saving import Saving
from megatron_port.train.state import Position, batch_schedule, find_checkpoints, load_first_whole

FENCED = max(LEVELS.values()) + 1
"""A wish that is above those of all signals: stop without saving."""
DAMAGED = FENCED + 1
"""Above every level of a signal: a rank's state is damaged."""


@dataclass
class Progress:
    """Counters of a run; the only ones."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples consumed."""
    skipped: int = 0
    """Steps whose update was not applied."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run: its counters, its exit code, its last validation loss."""

    progress: Progress
    exit_code: int
    validation_loss: float | None


class Trainer:
    """Training loop of one rank."""

    def __init__(self, session: Session) -> None:
        self.session, self.config, self.ctx = session, session.config, session.ctx
        self.progress = Progress()
        self.numerics = NumericsGuard(self.config)
        self.rates: deque[tuple[float, float]] = deque(maxlen=1000)
        self.committer = Committer(session.fence)
        self._damage: Damage | None = None
        check_replay_settings(self.config, session)
        checkpoints = find_checkpoints(session)
        self.batches = batch_schedule(session, checkpoints)
        self.loaders = self._load_data()
        self.routes = RunRoutes(session, self.loaders.data_fingerprint)
        self.document = document_length(self.config, self.loaders.train.dataset) if session.is_rank_zero else 0.0
        started = time.perf_counter()
        fresh, initial = not checkpoints, self.config.checkpoint.initial_weights
        self.engine: Engine = build_engine(
            self.config, self.ctx, session.providers, initialise=fresh and not initial, progress=session.progress
        )
        self.base = agreed(lambda: base_identity(session))
        self.teacher = agreed(lambda: teacher_identity(self.config) if session.is_rank_zero else None)
        if fresh and initial:
            session.logger.log(load_initial(self.engine, session))
        loaded: Checkpoint | None = None
        if checkpoints:
            loaded = load_first_whole(self.engine, checkpoints, session)
            self._resume(loaded)
            loaded.close()
        else:
            self.engine.record_state()
        self._announce(time.perf_counter() - started, loaded)
        self.activations = ActivationPlanner(session, self.engine)
        self.activations.begin(self.progress.step)
        self.routes.attach(self.engine, self.progress.step)
        self.profiler = StepProfiler.of(session, self.progress.step)

    def _resume(self, loaded: Checkpoint) -> None:
        """Take the counters of a checkpoint that the engine has loaded; print lines on what differs."""
        log = self.session.logger.log
        self._take_counters(loaded)
        carry_companions(loaded.path, self.session)
        log(f"resumed from {loaded.path} at step {self.progress.step}, {self.progress.samples} samples")
        # An older one than the newest may have been taken.
        check_batch(loaded.manifest, self.config, self.ctx.size("dp"), str(loaded.path))
        for line in [
            *changes_since(loaded.manifest, self.config, self.loaders.tokenizer_name, loaded.path.name),
            *check_data_fingerprint(loaded, self.config, self.loaders),
        ]:
            log(line)

    def _take_counters(self, loaded: Checkpoint, *, medians_only: bool = False) -> None:
        p, state = self.progress, loaded.manifest.state
        p.step, p.samples, p.skipped = state.step, state.samples, int(state.extra.get("skipped_total", 0))
        self.numerics.load(state.extra.get("numerics", {}), medians_only=medians_only)
        self.committer.resumed(loaded.manifest.lineage, state.step)

    def _load_data(self) -> Loaders:
        c, ctx = self.config, self.ctx
        return agreed(lambda: build_loaders(
            c, dp_rank=ctx.index("dp"), dp_size=ctx.size("dp"), need_tokens=ctx.is_first_stage,
            need_labels=ctx.is_last_stage, train_samples=self.batches.samples_before(c.training.steps),
            partition=sequence_partition(ctx.mesh, ctx.rank, order=c.layout.cp_order),
        ), where=str(ctx.coords))

    def _announce(self, seconds: float, begun_at: Checkpoint | None) -> None:
        c, t, log = self.config, self.ctx.topology, self.session.logger.log
        log(self.session.providers.describe())
        log(
            f"model {c.model.name}: {counted(c.model, c.fine_tuning)}; layout {t.sizes()}"
            f"{', sequence parallel' if c.layout.sequence_parallel and t.tp > 1 else ''}, ZeRO-{c.layout.zero_stage}, "
            f"recompute {'by plan' if c.activations.choices else c.activations.policy}, "
            f"{c.precision.dtype}, engine {c.engine}; model built in {seconds:.1f} s"
        )
        every = self.engine.state_check.interval
        if every != 1:
            log(f"state check every {every} updates (numerics.state_check_interval)" if every else "no state check")
        agreed(lambda: self._claim_folder(begun_at) if self.session.is_rank_zero else None)

    def _claim_folder(self, begun_at: Checkpoint | None) -> None:
        """Write into the run's folder, on rank 0, which run it is of, its configuration, and that it has started."""
        c, folder = self.config, run_folder(self.config)
        manifest, path = (begun_at.manifest, begun_at.path) if begun_at is not None else (None, None)
        try:
            settle(folder, c, manifest, self.session.fence, path=path)
            write_bytes(folder / "config.toml", to_toml(c).encode())
        except OSError as error:
            raise disk_error(error, folder) from error
        record_start(self.session, self.progress.step)

    def run(self) -> TrainingResult:
        """Train to ``training.steps``; on a signal save and return early."""
        c, p = self.config, self.progress
        telemetry = self._telemetry()
        validation: float | None = None
        begun_at = p.step
        saving = Saving(self.engine, self.session, saved_step=p.step, committer=self.committer)
        try:
            with StopRequest() as stop:
                level = self._agreed(stop.level)  # a signal may have come while the run started
                if not level and p.step == 0 and c.training.eval_batches:
                    validation = self._evaluate(telemetry)
                while p.step < c.training.steps and not level:
                    if self.profiler is None:
                        anomaly = self._step(telemetry)
                    else:
                        with self.profiler.step(p.step + 1):
                            anomaly = self._step(telemetry)
                    level = self._agreed(stop.level)
                    if anomaly is not None and c.numerics.on_anomaly == "rewind":
                        telemetry.close()
                        with self.session.progress.enter(START, "rewind"):  # it may take as long as loading
                            saving.finish()
                            self._rewind(anomaly)
                        telemetry, saving.saved_step = self._telemetry(), p.step
                        continue
                    saving.poll()
                    if self._due(c.training.eval_interval) or (
                        p.step == c.training.steps and c.training.eval_batches
                    ):
                        validation = self._evaluate(telemetry)
                    if self._due(c.telemetry.replica_check_interval):
                        check_replicas(self.engine, self.ctx, step=p.step)
                    if self._due(c.numerics.replay_interval):
                        self._replay()
                    if self._due(c.checkpoint.save_interval):
                        with self.session.progress.enter(SAVE, "checkpoint"):
                            self._save(saving)
                unfinished = bool(level) and p.step < c.training.steps
                with self.session.progress.enter(SAVE, "checkpoint"):
                    saving.finish()
                    self._check_lease()
                    if c.checkpoint.save_final or unfinished:
                        self._save(saving, final=True)
                block_signals()  # what comes now comes too late to matter, and must not kill a rank that has saved
                self._check_lease()
                if self.session.is_rank_zero:
                    signal_name = name_of(level) if unfinished else ""
                    status = SAVED if unfinished else FINISHED
                    record_event(self.session, status, p.step, **({"signal": signal_name} if signal_name else {}))
                    outcome = AttemptOutcome(attempt_name(), status, p.step, signal_name, time.time())
                    write_outcome(run_folder(c), outcome)
        except BaseException:
            saving.leave()
            raise
        finally:
            telemetry.close()
            self.routes.close()
            if self.profiler is not None:
                self.profiler.close()
        if unfinished:
            self.session.logger.log(f"stopped by {stop.signal_name or 'another rank'} after step {p.step}")
        else:
            saving.await_copies()
            self.session.logger.log(finished_line(c, p.step, begun_at))
        if self.rates:
            self.session.logger.log(closing_lines(c, list(self.rates), self.document))
        return TrainingResult(p, EXIT_CODES[level if unfinished else 0], validation)

    def _replay(self) -> None:
        """Compute a micro-batch of the last step on another replica too."""
        first, _ = self.batches.step_plan(self.progress.step - 1)
        with self.session.progress.enter(EVALUATE, "replay on another replica"):
            replay_on_neighbour(
                self.engine, self.session, self.loaders.train, first_sample=self.numerics.position(first),
                step=self.progress.step,
            )

    def _telemetry(self) -> Telemetry:
        return Telemetry(
            run_folder(self.config), self.config, is_rank_zero=self.session.is_rank_zero,
            resumed_step=self.progress.step, warn=self.session.logger.log, guard=self.session.fence.check,
        )

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.progress.step % interval == 0

    def _agreed(self, level: int) -> int:
        """Return the highest stop level of any rank: a signal may reach one rank and not another.

        Raises:
            LeaseLost: on every rank: another attempt holds the run's folder by now.
            NumericsError: on every rank: the state of one is damaged.
        """
        if self.session.fence.lost:
            level = FENCED
        if self._damage is not None:
            level = DAMAGED
        if self.session.info.world_size > 1:
            self.session.progress.at(REDUCE, "signals, agreed by all ranks")
            wish = torch.tensor([level])
            dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self.session.cpu_group)
            self.session.progress.at(IDLE)
            level = int(wish)
        if level == DAMAGED:
            self._stop_if_damaged()
        if level == FENCED:
            self.session.fence.check()  # rank 0 knows who it is
            raise LeaseLost(f"{run_folder(self.config)} was taken over by another attempt; rank 0 says by which")
        return level

    def _check_lease(self) -> None:
        """Stop all ranks with LeaseLost if another attempt holds the folder now. Each step's lines check it as well."""
        with suppress(LeaseLost, OSError):
            self.session.fence.check()
        self._agreed(0)

    def _stop_if_damaged(self) -> None:
        """Raise NumericsError on every rank if anything but an update changed the state of one. Collective."""
        error = None if self._damage is None else NumericsError(
            f"{self._damage} {self._damage.how} (found at step {self.progress.step}): {self._damage.cause}, and resume "
            "from the last checkpoint; the weights of this step are not saved"
        )
        agree(error, where=str(self.ctx.coords), group=self.session.cpu_group)

    def _save(self, saving: Saving, *, final: bool = False) -> None:
        """Save a state that has just been checked: a damaged one must not become the newest checkpoint."""
        self._damage = self.engine.state_damage(now=True)
        self._stop_if_damaged()
        self.routes.flush()
        (saving.final if final else saving.save)(self._position())

    def _step(self, telemetry: Telemetry) -> Anomaly | None:
        c, p = self.config, self.progress
        started = time.perf_counter()
        first, size = self.batches.step_plan(p.step)
        if first != p.samples:
            raise NumericsError(
                f"step {p.step} should begin at sample {first}, but {p.samples} were consumed; the batch sizes of this "
                "run differ from those of the checkpoint"
            )
        lr = learning_rate(c.optimizer, p.step, c.training.steps)
        position, limits = self.numerics.position(first), self.numerics.limits()
        progress = self.session.progress
        progress.begin_step(p.step)
        progress.at(DATA, "samples from", position)
        micro_batches = self.loaders.train.step(position, size)
        self.routes.begin_step(p.step, micro_batches)
        result = self.engine.train_step(micro_batches, step=p.step, lr=lr, limits=limits)
        self.routes.end_step()
        progress.end_step()
        seconds = time.perf_counter() - started
        p.step += 1
        p.samples += size
        p.skipped += result.skipped
        self.activations.after_step(p.step)
        self._damage = self.engine.state_damage()
        reason = self.numerics.judge(result, limits)
        too_many = self.numerics.record(p.step) if reason else False
        self._report(telemetry, result, lr=lr, size=size, seconds=seconds)
        if not reason:
            self.numerics.accept(result)
            return None
        self._stop_if_damaged()  # what a flipped bit did must not be taken for the data's fault
        with progress.enter(EVALUATE, "replay of a step"):
            anomaly = investigate(
                self.engine, self.session, micro_batches, result, step=p.step - 1, lr=lr, limits=limits, reason=reason,
                first=position, count=size, run_folder=run_folder(c),
            )
        self.session.logger.log(anomaly.summary)
        record_event(self.session, "anomaly", p.step, reason=anomaly.summary)
        if too_many or c.numerics.on_anomaly == "stop":
            count = len(self.numerics.anomaly_steps)
            why = f"; {count} anomalies within 1,000 steps (numerics.max_anomalies)" if too_many else ""
            if self.numerics.steps_in_a_row > 2:
                row = self.numerics.steps_in_a_row
                why += f", {row} in a row on other samples each: suspect the weights, not the data"
            raise NumericsError(
                f"{anomaly.summary}{why}. Samples {position} to {position + size - 1}; see "
                f"{run_folder(c)}/anomaly-{p.step}.json. Lower optimizer.lr, check the data, leave the host out, or "
                "resume before this step"
            )
        return anomaly

    def _rewind(self, anomaly: Anomaly) -> None:
        """Return to the newest checkpoint of this run; samples that do it again are left out from then on."""
        p, session = self.progress, self.session
        checkpoint_config = replace(self.config.checkpoint, resume="auto")
        found = find_checkpoints(replace(session, config=replace(self.config, checkpoint=checkpoint_config)))
        if not found:
            raise NumericsError(
                f"{anomaly.summary}. There is no checkpoint to rewind to yet; set checkpoint.save_interval below "
                f"{p.step}, or numerics.on_anomaly = \"skip\""
            )
        loaded = load_first_whole(self.engine, found, session)
        self._take_counters(loaded, medians_only=True)
        loaded.close()
        self.routes.attach(self.engine, p.step)
        left = ""
        if anomaly.verdict == REPRODUCIBLE:
            self.numerics.leave_out(anomaly.first, anomaly.count)
            left = f"; samples {anomaly.first} to {anomaly.first + anomaly.count - 1} are left out"
        session.logger.log(f"rewound to {loaded.path} at step {p.step}{left}")
        record_event(session, "rewind", p.step, reason=anomaly.summary)

    def _report(self, telemetry: Telemetry, r: StepResult, *, lr: float, size: int, seconds: float) -> None:
        c, p = self.config, self.progress
        devices = self.ctx.topology.world_size
        model = model_flops(c.model, c.fine_tuning, self.document) * size / seconds / devices / 1e12
        executed = hardware_flops(
            c.model, c.activations.recompute, self.ctx.topology.tp, self.activations.choices, c.fine_tuning,
            self.document,
        )
        hardware = executed * size / seconds / devices / 1e12
        record = {
            "step": p.step, "loss": r.loss if r.tokens else None, "mtp_loss": further_loss(r.auxiliary),
            **reward_means(r.auxiliary, r.tokens), **distillation_means(r.auxiliary, r.tokens),
            "learning_rate": lr, "loss_scale": r.loss_scale, "skipped": r.skipped,
            "skipped_total": p.skipped, "anomalies_total": self.numerics.anomalies_total,
            "samples": p.samples, "tokens": p.samples * c.model.seq_length,
            "tokens_per_second": size * c.model.seq_length / seconds, "seconds": seconds,
            "model_tflops_per_device": model, "hardware_tflops_per_device": hardware,
            "memory_bytes": self._peak_memory(), "fragmentation_bytes": self._fragmentation(),
        }
        self.rates.append((hardware, model))
        if r.grad_norm is not None:
            record["grad_norm"] = r.grad_norm
        if c.cluster.peak_tflops:
            record |= {"mfu": model / c.cluster.peak_tflops, "hfu": hardware / c.cluster.peak_tflops}
        telemetry.step(record, r.tallies)

    def _peak_memory(self) -> int:
        if self.session.device.is_gpu:
            return int(torch.cuda.max_memory_allocated())
        return peak_resident_bytes()

    def _fragmentation(self) -> int | None:
        """Bytes that the device's allocator has reserved beyond what it has given out; None on a CPU."""
        if not self.session.device.is_gpu:
            return None
        return int(torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated())

    def _evaluate(self, telemetry: Telemetry) -> float:
        c = self.config
        started = time.perf_counter()
        total = EvalResult(0.0, 0)
        with self.session.progress.enter(EVALUATE), self.engine.evaluated_weights():
            for batch in self.loaders.eval_batches("valid", c.training.eval_batches, c.batch.global_batch_size):
                result = self.engine.eval_step(batch)
                total = EvalResult(total.loss_sum + result.loss_sum, total.tokens + result.tokens)
        loss = total.loss
        telemetry.evaluation(step=self.progress.step, validation_loss=loss, seconds=time.perf_counter() - started)
        return loss

    def _position(self) -> Position:
        p = self.progress
        return Position(
            step=p.step, samples=p.samples, skipped=p.skipped, tokenizer=self.loaders.tokenizer_name,
            numerics=self.numerics.state(), tokenizer_identity=self.loaders.tokenizer,
            corpora=self.loaders.data_fingerprint, base=self.base, teacher=self.teacher,
        )
