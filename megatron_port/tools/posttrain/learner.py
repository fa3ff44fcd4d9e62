"""A run's engine as five verbs, on every layout: a script brings samples and a loss, and says when to update.

    with open_session(config) as session:
        learner = Learner(session)
        for samples in batches:                     # the same on every rank: the whole global batch
            losses = learner.forward_backward(samples)
            step = learner.optim_step(lr=1e-5)

Samples are divided between replicas, cut into micro-batches and filled up here; which rank has which part of the model
is the engine's business. All methods are collective: every rank calls them with the same arguments, and gets the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from megatron_port.core.checkpoint.writer import Committer
from megatron_port.core.config.dump import to_toml
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.dataset import Sample
from megatron_port.core.data.loader import RankView
from megatron_port.core.data.objective import Objective, WholeSamples
from megatron_port.core.dist.agree import agreed
from megatron_port.core.engine.api import StepResult
from megatron_port.core.engine.loss_reduction import global_count, summed_over_replicas
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.engine.native_step import HashAndGather, Reduce, StepState, run_parts
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.io.files import write_text
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.optim.schedules import learning_rate
from megatron_port.core.registry import LOSSES, OBJECTIVES
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import Session
from megatron_port.ext.telemetry.sinks import Telemetry
from megatron_port.run.build import build_engine
from megatron_port.run.loading import load_into
from megatron_port.run.saved_model import checkpoint_at, nothing_at
from megatron_port.run.state import Position, save_state
from megatron_port.run.weights import open_weights
from megatron_port.tools.inference.generation import Continuation, Generator, Sampling
from megatron_port.tools.posttrain.live import LiveModel, LiveWeights


@dataclass(frozen=True)
class Losses:
    """Result of a forward and backward pass over a global batch; the same on every rank."""

    loss: float
    """Mean loss by the objective, before the update; 0 where nothing counts."""
    count: float
    """Denominator of the mean: tokens, answers, pairs or weights."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Numbers of the objective, by name"""


class TokenLogProbabilities(Objective):
    """Keeps what the head says of each label, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return the sum of the token losses, which are kept."""
        assert stage.head is not None
        losses = stage.head.token_losses(logits, labels)
        self.found.append(losses.detach())
        return losses.sum()


class Learner:
    """One rank's part of a model in training.

    Args:
        session: of ``open_session``; engine native.
        weights: what training begins with: a checkpoint, a run's folder or a Hugging Face folder; empty:
            ``checkpoint.initial_weights``, or the run's initial values. Steps are not captured.

    Raises:
        ConfigError: the run's engine is another, or it has frozen weights or a loss of a plugin's.
        CheckpointError: on every rank: ``weights`` are damaged or of another model.
    """

    def __init__(self, session: Session, weights: str | Path = "") -> None:
        config = session.config
        for wrong, why in (
            (config.engine != "native",
             f'engine {config.engine!r}, which does not show the parts of a step; set "native"'),
            (config.fine_tuning.enabled or config.quantisation.enabled,
             "frozen weights; leave [fine_tuning] and [quantisation] out"),
            (config.training.loss in LOSSES.added,
             f"training.loss {config.training.loss!r}, by which log-probabilities would be another number; set "
             '"cross_entropy"'),
        ):
            if wrong:
                raise ConfigError(f"a Learner does not go with {why}")
        config = replace(config, backend=replace(config.backend, graphs="off"))
        self.session, self.config = session, config
        engine = build_engine(config, session.ctx, session.providers, progress=session.progress)
        assert isinstance(engine, NativeEngine)
        self.engine = engine
        self.step = self.samples = 0
        """Updates taken, and samples consumed."""
        self._own, self._committer = engine.objective, Committer(fence=session.fence)
        self._pending: StepState | None = None
        self._numbers, self._rate = engine.values.host, 0.0
        """Numbers of the step that waits, which an evaluation in between overwrites; rate of the last update"""
        self._model: LiveModel | None = None
        self._telemetry: Telemetry | None = None
        self._since = time.monotonic()
        weights = weights or config.checkpoint.initial_weights
        if weights:
            found = agreed(lambda: open_weights(Path(weights)))
            agreed(lambda: engine.load_weights(found.read))

    # -- the five verbs ----------------------------------------------------------------------------------------------

    def forward_backward(self, samples: Sequence[Sample], objective: Objective | str | None = None) -> Losses:
        """Add the gradients of the mean loss of a global batch to those that wait for :meth:`optim_step`.

        Args:
            samples: the global batch; of ``seq_length + 1`` tokens or fewer, which are filled up.
            objective: an object, or the name of one (``training.loss``); None: the run's own.

        Raises:
            DataError: a sample is too long, or has an id outside the vocabulary.
            ConfigError: the objective changes the model, or reads what this run does not make; or gradients wait, and
                ``[offload]`` has moved them away or experts' biases are balanced by one batch.
        """
        self._use(self._objective(objective))
        moved = self.config.offload.optimizer != "none"
        if self._pending is not None and (moved or self.config.model.moe.balance_bias):
            raise ConfigError("[offload] keeps the gradients, and moe.balance_bias the counts, of one batch; call "
                              "optim_step after each forward_backward")
        micro_batches = self._divided(samples, training=True)
        engine, waiting = self.engine, self._pending
        kept = [] if waiting is None else [piece.gradient.clone() for piece in engine.sharded.pieces]
        if not engine.stage.training:
            engine.stage.train()
        engine.stream.enabled = True
        state = StepState(micro_batches, self.step, lr=0.0)
        parts = [engine.parts.count]
        for part in engine.parts.gradients:
            parts.append(part)
            if kept and isinstance(part, Reduce):
                parts.append(_Add(kept, engine))
        run_parts(parts, state)
        if waiting is not None:  # either batch may forbid the update
            state.skip = torch.maximum(state.skip, waiting.skip)
        self._pending, self.samples, self._numbers = state, self.samples + len(samples), engine.values.host
        (loss, count), sums = state.sums.tolist(), state.auxiliary.tolist()
        named = dict(zip(engine.sums.auxiliary.names, sums, strict=True))
        return Losses(loss / max(count, 1.0), count, engine.objective.metrics(named, round(count)))

    def optim_step(self, *, lr: float | None = None) -> StepResult:
        """Update the weights by the gradients that wait. Loss and tokens of the result are the last batch's.

        ``lr``: None: the run's schedule says.

        Raises:
            ConfigError: there are none.
        """
        state, engine = self._pending, self.engine
        if state is None:
            raise ConfigError("optim_step without gradients; call forward_backward before it")
        rate = learning_rate(self.config.optimizer, self.step, self.config.training.steps) if lr is None else lr
        engine.values.set(replace(self._numbers, lr=rate))
        run_parts([engine.parts.verify, engine.parts.apply, HashAndGather(engine.sharded)], state)
        self._pending, self._rate = None, rate
        result = engine.read_result(state)
        self.step += 1
        return result

    def evaluate(self, samples: Sequence[Sample], objective: Objective | str | None = None) -> Losses:
        """Return the mean loss of samples by the weights of now, dropout off; arguments as of :meth:`forward_backward`.
        Gradients that wait stay. The objective's metrics are left out."""
        self._use(self._objective(objective))
        batches, ctx = self._divided(samples, training=False), self.session.ctx
        # Not the result's count, which is whole: weights and shares of answers are not.
        count = global_count(batches, self.engine.objective, ctx, seq_length=self.config.model.seq_length)
        return Losses(self.engine.eval_step(batches).loss_sum / max(count, 1.0), count)

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return the log-probability of each label of each sample by the weights of now, [tokens - 1], dropout off.

        By the same ops as training, so in a model without dropout, router jitter and expert capacity they are, on one
        layout, bit for bit what the pass that trains has: float32, float64 in float64 runs.
        """
        objective, ctx = TokenLogProbabilities(), self.session.ctx
        self._use(objective)
        micro_batches, partition = self._divided(samples, training=False), RankView.on(self.config, ctx).partition
        self.engine.eval_step(micro_batches)
        wide = torch.float64 if self.engine.dtype == torch.float64 else torch.float32
        table = torch.zeros(len(samples), self.config.model.seq_length, dtype=wide, device=ctx.device)
        for batch, losses in zip(micro_batches, objective.found, strict=bool(objective.found)):
            division = partition.divided(batch.division).held(self.config.model.seq_length)
            columns = division.index(table.device)
            for number, row in zip(batch.sample_ids, losses, strict=True):
                at = number - self.samples
                if at < len(samples):
                    table[at, columns] = -row.to(wide)
        summed_over_replicas(table, ctx)
        rows = table.cpu().numpy()
        return [rows[i, : len(sample.tokens) - 1] for i, sample in enumerate(samples)]

    def save(self) -> Path:
        """Commit a checkpoint into the run's folder, as ``megatron-port train`` does; return it."""
        self._idle("save")
        self._use(self._own)
        at = Position(step=self.step, samples=self.samples, skipped=0, objective=self._own.identity())
        return save_state(self.engine, self.session, at, self._committer)

    def load(self, path: str | Path = "") -> Path | None:
        """Continue from a checkpoint of any layout, or the newest of a folder (empty: the run's own, if it has one).

        Raises:
            CheckpointError: on every rank: it is damaged, of another model, or not there.
        """
        self._idle("load")
        self._use(self._own)
        place = Path(path) if path else run_folder(self.config)
        found = checkpoint_at(place) if place.exists() else None
        if found is None:
            if path:
                raise nothing_at(place)
            return None
        checkpoint = load_into(self.engine, found, self.session)
        state = checkpoint.manifest.state
        self.step, self.samples = state.step, state.samples
        self._committer.resumed(checkpoint.manifest.lineage, state.step)
        checkpoint.close()
        return found

    def weights(
        self, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of now under their names in Hugging Face's format, on every rank's CPU, one at a time.

        Args:
            names: those wanted; None: all. Every rank must take as many.
            dtype: they are rounded to; None: as the masters are.

        Raises:
            CheckpointError: no architecture there computes the model, or it lacks a name.
        """
        for name, tensor in LiveWeights(self.engine, self.session).named(names):
            yield name, tensor if dtype is None else tensor.to(dtype)

    def report(self, losses: Losses, result: StepResult, **more: float) -> None:
        """Write a line of metrics.jsonl into the run's folder, and to the console and trackers that the run names.

        ``more``: other metrics, by the names of docs/metrics.md or those that a plugin declared.
        """
        now = time.monotonic()
        if self._telemetry is None:
            folder = run_folder(self.config)
            if self.session.is_rank_zero:
                folder.mkdir(parents=True, exist_ok=True)
                write_text(folder / "config.toml", to_toml(self.config))
            self._telemetry = Telemetry(
                folder, self.config, is_rank_zero=self.session.is_rank_zero, warn=self.session.logger.log,
                resumed_step=self.step - 1, guard=self.session.fence.check)
        self._telemetry.step({
            "step": self.step, "loss": losses.loss, "grad_norm": result.grad_norm, "learning_rate": self._rate,
            "skipped": result.skipped, "loss_scale": result.loss_scale, "samples": self.samples,
            "seconds": now - self._since, **losses.metrics, **more})
        self._since = now

    def close(self) -> None:
        """Finish what :meth:`report` writes."""
        if self._telemetry is not None:
            self._telemetry.close()

    # -- sampling ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, batch_size: int = 8
    ) -> list[Continuation]:
        """Continue prompts by the weights of now; the same on every rank. Keeps a second copy of a stage's weights."""
        if self._model is None:
            self._model = LiveModel(self.session)
        self._model.refresh(self.engine, self.session)
        return Generator(self._model).generate(prompts, sampling, batch_size=batch_size)

    # -- within ------------------------------------------------------------------------------------------------------

    def _idle(self, verb: str) -> None:
        if self._pending is not None:
            raise ConfigError(f"{verb} while gradients wait, which no checkpoint holds; call optim_step before it")

    def _objective(self, asked: Objective | str | None) -> Objective:
        if asked is None:
            return self._own
        if asked == "cross_entropy":
            return Objective(self.config)
        found = OBJECTIVES.function(asked)(self.config) if isinstance(asked, str) else asked
        if self.config.model.mtp_layers:
            raise ConfigError(f"{type(found).__name__} with model.mtp_layers, which have no loss by it; set 0")
        if self.config.activations.head_chunk and getattr(getattr(found, "settings", None), "entropy", 0):
            raise ConfigError("policy.entropy needs whole logits; set activations.head_chunk = 0")
        if type(found).build is not Objective.build or found.terms:
            raise ConfigError(f"{type(found).__name__} adds to the model, so only a run can have it; set training.loss")
        return found

    def _use(self, objective: Objective) -> None:
        if self.engine.objective is not objective:
            self.engine.set_objective(objective)

    def _divided(self, samples: Sequence[Sample], *, training: bool) -> list[MicroBatch]:
        """Return this replica's micro-batches of a global batch, filled up with samples that do not count."""
        ctx, size = self.session.ctx, self.config.batch.micro_batch_size
        if not samples:
            raise DataError("no samples; a global batch has one at least")
        replicas, own, seq = ctx.size("dp"), ctx.index("dp"), self.config.model.seq_length
        view = replace(RankView.on(self.config, ctx), objective=self.engine.objective)
        moe = self.config.model.moe
        if training and len(samples) % (size * replicas) and (
                moe.z_weight or moe.balance_bias or (moe.balance_weight and moe.balance_loss != "none")):
            raise DataError(f"{len(samples)} samples do not fill micro-batches of {size} on {replicas} replicas, and "
                            "what fills them up would be balanced over experts; bring a multiple of "
                            f"{size * replicas}")
        for number, sample in enumerate(samples):  # on every rank, so that all raise
            _check(sample, number, seq, self.config.model.vocab_size)
        rounds = -(-len(samples) // (size * replicas))
        documents = self.config.data.attention_documents == "within"
        layout = view.objective.side_layout
        empty = Sample(np.zeros(2, np.int64), counted=np.zeros(1, bool), side={
            name: np.zeros_like(value[:1] if layout.get(name) == "position" else value)
            for name, value in samples[0].side.items()})
        whole = [_filled(sample, seq, layout) for sample in samples]
        _ = view.objective.side(WholeSamples(  # likewise: what the objective does not find
            tuple(range(len(whole))), torch.from_numpy(np.stack([row.tokens for row in whole]))[:, 1:], None, None,
            rows=whole, training=training))
        whole += [_filled(empty, seq, layout)] * (rounds * size * replicas - len(whole))
        made = []
        for m in range(rounds):
            numbers = [(m * replicas + own) * size + i for i in range(size)]
            rows = [whole[n] for n in numbers]
            mask = torch.from_numpy(np.stack([row.counted for row in rows if row.counted is not None])).float()
            starts = [np.zeros(seq, np.int32) if row.starts is None else row.starts for row in rows]
            made.append(view.micro_batch(
                tuple(self.samples + n for n in numbers),
                np.stack([row.tokens for row in rows]) if view.reads else None, mask=mask, labels_masked=True,
                rows=rows, starts=starts if documents else (), training=training))
        return made


@dataclass(frozen=True)
class _Add:
    """Adds gradients of the batches before to those of this one, between their reduction and the norm."""

    kept: list[torch.Tensor]
    engine: NativeEngine

    def run(self, state: StepState) -> None:
        """Run the part."""
        for piece, before in zip(self.engine.sharded.pieces, self.kept, strict=True):
            piece.gradient.add_(before)


def _check(sample: Sample, number: int, seq: int, vocab_size: int) -> None:
    """Raise DataError where the model cannot read a sample."""
    length = len(sample.tokens)
    if not 2 <= length <= seq + 1:
        raise DataError(f"sample {number} has {length} tokens; the model takes 2 to {seq + 1} (model.seq_length + 1)")
    low, high = int(np.min(sample.tokens)), int(np.max(sample.tokens))
    if low < 0 or high >= vocab_size:
        raise DataError(f"sample {number}: token id {low if low < 0 else high} is outside the vocabulary of "
                        f"{vocab_size}")


def _filled(sample: Sample, seq: int, layout: Mapping[str, str]) -> Sample:
    """Return a sample with ``seq + 1`` tokens; what is added does not count. ``layout``: of side tensors, by name."""
    length = len(sample.tokens)
    missing = seq + 1 - length
    counted = np.ones(length - 1, dtype=bool) if sample.counted is None else sample.counted

    def more(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.zeros((missing, *values.shape[1:]), dtype=values.dtype)])

    starts = sample.starts
    if starts is not None:
        starts = np.concatenate([starts, np.full(missing, starts[-1], dtype=np.int32)])
    side = {name: more(value) if layout.get(name) == "position" and len(value) < seq else value
            for name, value in sample.side.items()}
    return Sample(more(np.asarray(sample.tokens, dtype=np.int64)), starts, more(counted), side)


__all__ = ["Learner", "Losses", "Sampling"]
