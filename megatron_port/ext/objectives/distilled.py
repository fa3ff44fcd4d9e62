"""Learning from a teacher ([distillation]): the token loss that also compares the model's prediction with a teacher's.

A teacher runs beside the model: each stage has a stage of the teacher, both read the same tokens, and the last compares
what they predict. Or a file has what it predicts (``objectives.distillation``), as side tensors.

The teacher's layers are split over the same virtual stages as the model's, and what passes between two of its parts
travels in the same message. So every pipeline schedule serves both, each rank holds its share of the teacher, and the
teacher's logits arise where, when and with the columns that the loss needs. The alternative, a pass of the teacher's
own through the pipeline before the model's, would fill it a second time and keep the logits of all micro-batches.

The teacher's parameters are records like the model's, frozen, under names of their own: ZeRO stage 3 shards and gathers
them, the state check watches them, and no checkpoint has them. It has no dropout, no gradient, and no part in what
routers count. Evaluations do not run it: they report the cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron_port.core.config.checks import problems
from megatron_port.core.config.model import ModelConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.objective import Objective, WholeSamples
from megatron_port.core.dist.collectives import Group, recorded_buffers
from megatron_port.core.dist.record import ParameterRecord, StateReader, record_of
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import StepContext, StepSlot
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder import GPTStage, Held, SharedStages, shared_layers
from megatron_port.core.model.shapes import fingerprint
from megatron_port.core.registry import PARTS
from megatron_port.ext.objectives.distillation import Objective as TokenTerms
from megatron_port.ext.objectives.distillation import Stored, StoredLogits, vocab_parallel_distillation
from megatron_port.ext.objectives.settings import as_teacher, teacher_run

PREFIX = "teacher."
"""Before the names of the teacher's parameters."""
SUMS = ("cross_entropy", "teacher_kl")
"""Names of the sums of a step over its tokens, and of their means in metrics.jsonl."""
SIDE = ("teacher_ids", "teacher_log_probabilities", "teacher_log_tail")
"""Side tensors [batch, seq, …]: the fields of ``Stored``, fp32 or fp64, in their order."""


class DistillationObjective(Objective):
    """The mean of a token loss with a teacher's part; evaluations report the cross-entropy. What contradicts it is in
    ``config.features``."""

    side_layout = MappingProxyType(dict.fromkeys(SIDE, "position"))
    sums = SUMS

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        d = config.distillation
        self.run, self.terms_of_a_token = config, TokenTerms(d.alpha, d.temperature, reverse=d.divergence == "reverse")
        self.frozen_prefix = PREFIX if d.online else ""
        self._stored: StoredLogits | None = None

    # -- data --------------------------------------------------------------------------------------------------------

    def open_side(self, samples: int, *, whole: bool) -> None:
        """Open the folder of ``distillation.logits``. Raises DataError."""
        if not self.run.distillation.logits:
            return
        self._stored, model = StoredLogits(self.run.distillation.logits), self.run.model
        self._stored.check(
            vocab_size=model.vocab_size, seq_length=model.seq_length, temperature=self.run.distillation.temperature,
            samples=samples if whole else 1,
        )

    def side(self, samples: WholeSamples) -> dict[str, torch.Tensor]:
        """Return what is kept of the teacher at each position, of samples that are trained on."""
        if self._stored is None or not samples.training:
            return {}
        found = [self._stored.read(number, row) for number, row in zip(samples.ids, samples.rows)]
        return {
            name: torch.stack([getattr(one, f.name) for one in found]) for name, f in zip(SIDE, fields(Stored))
        }

    # -- loss --------------------------------------------------------------------------------------------------------

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return the sum of the token losses of a micro-batch; in evaluation of the cross-entropies alone."""
        if not stage.training:
            return super().loss(stage, logits, labels, mask, context)
        if stage.head is None or context is None:
            raise ValueError("loss_sum on a stage without the head, or before a micro-batch was announced")
        head: Any = stage.head
        record, labels, target = record_of(head.weight), labels.t(), self._target(stage, context)

        def losses(part: torch.Tensor, at: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return vocab_parallel_distillation(
                part, labels[at], target(at), self.terms_of_a_token, offset=record.offset[0], extent=record.extent[0],
                group=head.group,
            )

        found = head.losses_of(logits, losses) if head.defers else losses(logits, slice(None))
        loss, *parts = (x.t() if mask is None else x.t() * mask for x in found)
        for name, part in zip(SUMS, parts):
            context.add_auxiliary(name, part.sum())
        return loss.sum()

    def _target(self, stage: GPTStage, context: StepContext) -> Callable[[slice], torch.Tensor | Stored]:
        """Return a function from a slice of positions of the micro-batch in flight to the teacher's prediction there,
        [positions, batch, …]."""
        if isinstance(stage, DistilledStage):
            judged, head = stage.take_judged(), cast(Any, stage.teacher.head)
            made: Callable[[slice], torch.Tensor] = head.logits_at(judged) if head.defers else judged.__getitem__
            return made
        if not context.side:
            raise ValueError("a micro-batch without what the teacher's file keeps of its labels")
        stored = Stored(*(context.side[name] for name in SIDE)).map(lambda x: x.transpose(0, 1).contiguous())
        return lambda at: stored.map(lambda x: x[at])

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float | None]:
        """Return the means over a step's tokens."""
        return {name: sums[name] / count for name in SUMS} if count else {}

    # -- model -------------------------------------------------------------------------------------------------------

    def build(self, build: BuildContext, layers_by_chunk: Sequence[int]) -> list[GPTStage]:
        """Build the chunks with those of the teacher, unless a file has what it predicts.

        Raises:
            CheckpointError, ConfigError: as :func:`open_teacher`.
        """
        return _build_with_teacher(self, build, layers_by_chunk) if self.frozen_prefix else super().build(
            build, layers_by_chunk)

    def frozen_run(self) -> RunConfig:
        """Return the run of the teacher alone."""
        weights = open_teacher(self.run)
        weights.close()
        return teacher_run(self.run, weights.model)

    @contextmanager
    def add_frozen(self, read: StateReader) -> Iterator[StateReader]:
        """Yield a reader that has the teacher's weights beside the model's, for as long as something is loaded."""
        if not self.frozen_prefix:
            yield read
            return
        weights = open_teacher(self.run)
        teacher: StateReader = weights.read

        def both(
            name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
            out: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if self.is_frozen(name):
                return teacher(name.removeprefix(PREFIX), kind, offset, shape, out=out)
            return read(name, kind, offset, shape, out=out)

        try:
            yield both
        finally:
            weights.close()

    # -- run ---------------------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Check that the teacher is there and fits. Raises CheckpointError or ConfigError."""
        if self.run.distillation.teacher:
            open_teacher(self.run).close()

    def identity(self) -> dict[str, Any]:
        """Return which teacher a run has, for its checkpoints: a fingerprint of its values, and where they were.

        Raises:
            CheckpointError, ConfigError, DataError: as :func:`open_teacher`; the folder of its logits has no whole
                header.
        """
        d = self.run.distillation
        if d.logits:
            header = StoredLogits(d.logits).header
            return {"teacher": {"fingerprint": header.fingerprint, "path": header.teacher}}
        weights = open_teacher(self.run)
        try:
            return {"teacher": {"fingerprint": fingerprint(weights.model, weights.read), "path": d.teacher}}
        finally:
            weights.close()

    def check_resumed(self, extra: Mapping[str, Any], where: str) -> None:
        """Check that a run continues with the teacher of the checkpoint, if it had one.

        Raises:
            CheckpointError: it had another one.
        """
        saved, mine = extra.get("teacher"), self.identity()["teacher"]
        if not isinstance(saved, dict) or saved.get("fingerprint") == mine["fingerprint"]:
            return
        raise CheckpointError(
            f"{where} was trained with the teacher {saved.get('path')} (fingerprint "
            f"{str(saved.get('fingerprint'))[:12]}), and [distillation] names {mine['path']} (fingerprint "
            f"{mine['fingerprint'][:12]}): name that teacher, or begin another run with these weights "
            "(checkpoint.initial_weights)"
        )


class DistilledStage(GPTStage):
    """A stage with the teacher's stage of the same number, which has a step slot of its own (``GPTStage``)."""

    def __init__(
        self, build: BuildContext, *, start: int, stop: int, virtual: int | None = None,
        table: nn.Parameter | None = None, shared: SharedStages | None = None, held: Held | None = None,
        teacher: GPTStage,
    ) -> None:
        super().__init__(build, start=start, stop=stop, virtual=virtual, table=table, shared=shared, held=held)
        self.teacher = teacher
        self._judged: torch.Tensor | None = None
        for unit in teacher.units:
            unit.training_only, unit.backward_reads_weights = True, False  # type: ignore[assignment]

    @property
    def units(self) -> list[nn.Module]:
        """Units in the order of their passes: the model's, then the teacher's, then what ``loss_sum`` calls."""
        own, further = super().units, len(self.predictions)
        at = len(own) - further
        return [*own[:at], *self.teacher.units, *own[at:]]

    @property
    def row_exchanges(self) -> int:
        """Exchanges of rows between expert-parallel ranks in a forward pass, the teacher's among them."""
        return super().row_exchanges + self.teacher.row_exchanges

    def forward(  # type: ignore[override]  # between stages two tensors pass
        self, x: torch.Tensor, other: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        out: torch.Tensor = super().forward(x)
        if not self.training:
            return out
        judged = self._teach(x if other is None else other.view(self.dtype))
        if self.last:
            self._judged = judged
            return out
        # As bytes: what is no floating-point number has no gradient, and none is sent back.
        return out, judged.contiguous().view(torch.uint8)

    def _teach(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the teacher's stage makes of what it reads."""
        context, slot = self.step.current, self.teacher.step
        if context is not None:
            slot.current = replace(context, auxiliary=None, tallies=None, keepers={}, kept={})
        with torch.no_grad():
            out: torch.Tensor = self.teacher(x)
        return out

    def take_judged(self) -> torch.Tensor:
        """Return the teacher's logits of the micro-batch in flight [seq, batch, columns], once; where its head defers
        them, what it makes them of.

        RuntimeError: there are none.
        """
        judged, self._judged = self._judged, None
        if judged is None:
            raise RuntimeError("the loss before a forward pass of the teacher, or twice after it")
        return judged

    def boundary(self, batch: int, seq: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the name → (shape, dtype) of each tensor that passes between stages."""
        out = super().boundary(batch, seq)
        if self.training:
            ((*shape, width), dtype), = self.teacher.boundary(batch, seq).values()
            out["teacher"] = (*shape, width * dtype.itemsize), torch.uint8
        return out


def _build_with_teacher(
    objective: DistillationObjective, build: BuildContext, layers: Sequence[int]
) -> list[GPTStage]:
    """Build this rank's chunks, each with that of the teacher, given the model's number of layers of each virtual
    stage."""
    run, topology, chunks = objective.frozen_run(), build.ctx.topology, list[GPTStage]()
    providers = build.providers.teacher or build.providers
    context = BuildContext(
        model=run.model, layout=run.layout, ctx=build.ctx, providers=replace(providers, fp8=None),
        step=silent_slot(build.stream), dtype=build.dtype,
        options=BuildOptions(position_reset=objective.run.data.position_reset, head_chunk=build.head_chunk),
    )
    teacher_layers = PARTS.function("layers by chunk")(run, topology)
    tables: dict[BuildContext, nn.Parameter] = {}
    held: dict[BuildContext, Held] = {}

    def made(make: Callable[..., GPTStage], context: BuildContext, layers: Sequence[int], virtual: int) -> GPTStage:
        start = sum(layers[:virtual])
        stage = make(
            context, start=start, stop=start + layers[virtual], virtual=virtual, table=tables.get(context),
            shared=shared_layers(context.model, topology, layers), held=held.setdefault(context, {}),
        )
        if stage.embedding is not None:
            tables[context] = stage.embedding.word.weight
        return stage

    for chunk in range(topology.vp):
        virtual = topology.virtual_stage(build.ctx.index("pp"), chunk)
        teacher = made(GPTStage, context, teacher_layers, virtual)
        freeze(teacher)
        chunks.append(made(partial(DistilledStage, teacher=teacher), build, layers, virtual))
    return chunks


def freeze(teacher: nn.Module) -> None:
    """Give a teacher's parameters and buffers names of their own, and mark them as what updates leave alone."""
    for p in teacher.parameters():
        if not record_of(p).name.startswith(PREFIX):  # a table may be shared with an earlier chunk
            p.record = _frozen(record_of(p))  # type: ignore[attr-defined]
            p.requires_grad_(False)
    for record, buffer in recorded_buffers(teacher):
        buffer.record = _frozen(record)  # type: ignore[attr-defined]


def _frozen(record: ParameterRecord) -> ParameterRecord:
    tied = None if record.tied_key is None else PREFIX + record.tied_key
    return replace(record, name=PREFIX + record.name, tied_key=tied, trainable=False)


def silent_slot(stream: DropoutStream) -> StepSlot:
    """Return a slot for a teacher: of the same run, without dropout."""
    out = StepSlot(DropoutStream(stream.seed, stream.device))
    out.stream.enabled = False
    return out


def open_teacher(config: RunConfig) -> Any:
    """Open ``distillation.teacher`` (``run.weights.Weights``); its model predicts one token ahead,
    whatever was trained with it.

    Raises:
        CheckpointError: nothing usable is there.
        ConfigError: it has another vocabulary, reads shorter sequences, or cannot be split as the run is.
    """
    asked = config.distillation.teacher
    try:
        weights = PARTS.function("weight folder reader")(asked)
    except CheckpointError as error:
        raise CheckpointError(f'distillation.teacher = "{asked}": {error}') from None
    weights = replace(weights, model=as_teacher(weights.model))
    found = teacher_problems(config, weights.model)
    if found:
        weights.close()
        raise ConfigError([f'distillation.teacher = "{asked}": {problem}' for problem in found])
    return weights


def teacher_problems(config: RunConfig, teacher: ModelConfig) -> list[str]:
    """Return why a model cannot teach a run."""
    mine, layout = config.model, config.layout
    out = []
    if teacher.vocab_size != mine.vocab_size:
        out.append(
            f"its vocabulary has {teacher.vocab_size} tokens and the model's {mine.vocab_size}: their predictions can "
            "only be compared token by token; train the model with the teacher's tokenizer and model.vocab_size"
        )
    if teacher.seq_length < mine.seq_length:
        out.append(
            f"it reads sequences of {teacher.seq_length} tokens, and model.seq_length is {mine.seq_length}; use "
            f"model.seq_length = {teacher.seq_length} or less"
        )
    stages = layout.pipeline_parallel_size * layout.virtual_pipeline_size
    if teacher.num_layers < stages:
        out.append(
            f"it has {teacher.num_layers} layers for {stages} stages (layout.pipeline_parallel_size × "
            f"virtual_pipeline_size), each of which holds some; use {teacher.num_layers} or fewer"
        )
    tp = layout.tensor_parallel_size
    copies = [model.kv_heads_held(tp) // model.kv_heads for model in (teacher, mine)]
    if copies[0] != copies[1]:
        out.append(
            f"with layout.tensor_parallel_size {tp}, {copies[0]} ranks hold the same of its {teacher.kv_heads} "
            f"key/value heads and {copies[1]} the same of the model's {mine.kv_heads}: one mesh has one number; use at "
            f"most {min(teacher.kv_heads, mine.kv_heads)}"
        )
    if layout.expert_parallel_size > 1 and not (teacher.moe.enabled or mine.moe.enabled):
        out.append(f"layout.expert_parallel_size {layout.expert_parallel_size}: neither has experts to divide; use 1")
    if out:
        return out
    alone = teacher_run(config, replace(teacher, seq_length=mine.seq_length))  # the sequences are the run's
    return [f"split as the run is: {problem}" for problem in problems(alone) if problem not in problems(config)]


# The most likely tokens of logits over a split vocabulary, without gathering them.

_CHUNK = 1 << 22
"""Logits sorted at a time."""


def vocab_parallel_top(
    logits: torch.Tensor, k: int, temperature: float, *, offset: int, extent: int, group: Group
) -> Stored:
    """Return the ``k`` most likely tokens of softmax(logits / temperature) and the mass of the others.

    ``logits`` [..., padded_vocab/tp], of which this rank's columns are the ids [offset, offset + extent). Each rank
    sends its own k candidates. Of equal logits the smaller id is taken, on any layout. Float32 (float64 for float64
    logits); the same on all ranks of the group.
    """
    shape, wide = logits.shape[:-1], torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(1, _CHUNK // rows.shape[1])
    parts = [_top(rows[i : i + step, :extent].to(wide) / temperature, k, offset, group)
             for i in range(0, rows.shape[0], step)]
    ids, values, tail = (torch.cat(found) for found in zip(*parts))
    return Stored(ids.view(*shape, k), values.view(*shape, k), tail.view(shape))


def _top(
    x: torch.Tensor, k: int, offset: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [rows, k], log-probabilities [rows, k], that of the rest [rows]) of logits [rows, columns]."""
    values, columns = x.sort(dim=-1, descending=True, stable=True)
    short = max(k - x.shape[1], 0)
    values = torch.nn.functional.pad(values[:, :k], (0, short), value=float("-inf"))
    ids = torch.nn.functional.pad(columns[:, :k] + offset, (0, short), value=-1)
    if group is not None:
        values, ids = _gathered(values, group), _gathered(ids, group)
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # ranks in the order of their ids
        values, ids = values.gather(-1, order), ids.gather(-1, order)
    e = (x - values[:, :1]).exp_()
    local = ids - offset
    here = (local >= 0) & (local < x.shape[1])
    rest = torch.nn.functional.pad(e, (0, 1)).scatter(1, local.masked_fill(~here, x.shape[1]), 0.0).sum(dim=-1)
    if group is not None:
        dist.all_reduce(rest, group=group)
    kept = values - values[:, :1]
    log_z = (kept.exp().sum(dim=-1) + rest).log()
    return ids, kept - log_z[:, None], rest.log() - log_z


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
