"""A teacher's most likely tokens over a run's training order, computed ahead (``objectives.distillation``).

The teacher runs on any layout of engine native, in the precision of the run; what it reads of each sample, its
documents included, is what the run will train on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.loader import StepLoader, build_loaders
from megatron_port.core.dist.agree import agreed, broadcast_text
from megatron_port.core.dist.positions import sequence_partition
from megatron_port.core.dist.record import record_of
from megatron_port.core.engine.api import Engine
from megatron_port.core.engine.loss_reduction import summed_over_replicas
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.logging import Advance, silent
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.shapes import fingerprint
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.core.train.hooks import Session
from megatron_port.ext.objectives.distillation import LogitsHeader, Stored, StoredLogits, begin
from megatron_port.ext.objectives.distilled import vocab_parallel_top
from megatron_port.ext.objectives.settings import teacher_run
from megatron_port.run.build import build_engine
from megatron_port.run.weights import Weights


def logits_run(config: RunConfig, weights: Weights, top: int) -> RunConfig:
    """Return the run of the teacher alone over the samples of ``config``.

    Raises:
        ConfigError: another engine, or more tokens than the vocabulary has.
    """
    if not 1 <= top <= config.model.vocab_size:
        raise ConfigError(f"--top {top}: it must be at least 1 and at most the vocabulary's {config.model.vocab_size}")
    run = teacher_run(replace(config, engine="native"), replace(weights.model, seq_length=config.model.seq_length)
                      if weights.model.position_embedding == "rope" else weights.model)
    if run.model.seq_length != config.model.seq_length:
        raise ConfigError(f"the teacher's table has {run.model.seq_length} positions and model.seq_length is "
                          f"{config.model.seq_length}: set it to the teacher's to write its logits ahead, or run the "
                          "teacher beside the model (leave distillation.logits out)")
    return run


class _TopKeeper:
    """Takes the last stage's logits of each micro-batch of a block into arrays of the whole block."""

    def __init__(self, stage: GPTStage, header: LogitsHeader, samples: range) -> None:
        self.stage, self.header, self.samples = stage, header, samples
        dtype = torch.float64 if header.values == "fp64" else torch.float32
        count, seq, k = len(samples), header.seq_length, header.top
        # Sums of one rank's values and others' zeros are these values, to the bit.
        self.ids = torch.zeros(count, seq, k, dtype=torch.int64)
        self.log_p, self.tail = torch.zeros(count, seq, k, dtype=dtype), torch.zeros(count, seq, dtype=dtype)

    def __call__(self, logits: torch.Tensor, context: StepContext) -> None:
        """``logits`` [seq held, batch, columns]."""
        head = self.stage.head
        assert head is not None
        record = record_of(head.weight)
        found = vocab_parallel_top(
            logits.detach(), self.header.top, self.header.temperature, offset=record.offset[0],
            extent=record.extent[0], group=head.group,
        )
        at = self.stage.partition.divided(context.division).held(self.header.seq_length).index(torch.device("cpu"))
        for column, number in enumerate(context.sample_ids):
            if number in self.samples:
                row = number - self.samples.start
                self.ids[row, at] = found.ids[:, column].cpu()
                self.log_p[row, at] = found.log_probabilities[:, column].cpu()
                self.tail[row, at] = found.log_tail[:, column].cpu()

    def shared(self, session: Session) -> Stored:
        """Return the whole block on every rank. Collective."""
        def over(x: torch.Tensor) -> torch.Tensor:
            return summed_over_replicas(x.to(session.ctx.device), session.ctx).cpu()

        return Stored(over(self.ids), over(self.log_p), over(self.tail))


def compute_logits(
    session: Session, weights: Weights, folder: Path, *, top: int, block: int, temperature: float,
    advance: Advance = silent,
) -> LogitsHeader:
    """Compute what ``folder`` lacks of the samples that the session's run consumes. Collective.

    Raises:
        DataError: the folder has records of something else.
    """
    config, ctx = session.config, session.ctx
    samples = BatchSchedule(config.batch, ctx.size("dp")).samples_before(config.training.steps)
    header = LogitsHeader(
        teacher=str(weights.path), fingerprint=fingerprint(weights.model, weights.read),
        computed_in=config.precision.dtype, vocab_size=config.model.vocab_size, seq_length=config.model.seq_length,
        top=top, temperature=temperature, values="fp64" if config.precision.dtype == "fp64" else "fp32",
        samples=samples, block=block,
    )
    stored: StoredLogits | None = agreed(lambda: begin(folder, header) if session.is_rank_zero else None)
    lacking = "" if stored is None else " ".join(str(b) for b in range(header.blocks) if stored.damaged(b))
    todo = [int(b) for b in (broadcast_text(lacking, group=session.cpu_group) or "").split()]
    if not todo:
        return header
    loaders = build_loaders(
        config, dp_rank=ctx.index("dp"), dp_size=ctx.size("dp"), need_tokens=ctx.is_first_stage,
        need_labels=ctx.is_last_stage, train_samples=samples,
        partition=sequence_partition(ctx.mesh, ctx.rank, order=config.layout.cp_order),
    )
    engine = build_engine(config, ctx, session.providers, initialise=False)
    engine.load_weights(weights.read)
    unit = config.batch.micro_batch_size * ctx.size("dp")
    for number in todo:
        numbers = header.samples_of(number)
        keeper = _compute(engine, loaders.train, header, numbers, -(-len(numbers) // unit) * unit)
        agreed(partial(_write, stored, number, loaders.train, keeper.shared(session)), where=str(ctx.coords))
        advance(numbers.stop, samples)
    return header


def _write(stored: StoredLogits | None, block: int, loader: StepLoader, whole: Stored) -> None:
    """Write a block, on the rank that has the folder."""
    if stored is not None:
        numbers = stored.header.samples_of(block)
        rows = [Stored(*row) for row in zip(whole.ids, whole.log_probabilities, whole.log_tail)]
        samples = (loader.dataset.draw(loader.seed, n) for n in numbers)
        stored.write_block(block, map(stored.record, numbers, samples, rows))


def _compute(engine: Engine, loader: StepLoader, header: LogitsHeader, numbers: range, count: int) -> _TopKeeper:
    """Run the teacher over ``count`` samples from the first of ``numbers`` on, and keep those among them."""
    (stage,) = engine.chunks[-1:]  # type: ignore[attr-defined]  # of engine native
    keeper = _TopKeeper(stage, header, numbers)
    stage.on_logits = keeper
    try:
        engine.eval_step(loader.step(numbers.start, count))
    finally:
        stage.on_logits = None
    return keeper
