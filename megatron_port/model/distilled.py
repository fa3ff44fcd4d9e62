"""A stage with a stage of the teacher beside it: both read the same tokens, and the last compares what they predict.

The teacher's layers are split over the same virtual stages as the model's, and what passes between two of its parts
travels in the same message. So every pipeline schedule serves both, each rank holds its share of the teacher, and the
teacher's logits arise where, when and with the columns that the loss needs. The alternative, a pass of the teacher's
own through the pipeline before the model's, would fill it a second time and keep the logits of all micro-batches.

The teacher's parameters are records like the model's, frozen, under names of their own: ZeRO stage 3 shards and gathers
them, the state check watches them, and no checkpoint has them. It has no dropout, no gradient, and no part in what
routers count. Evaluations do not run it: they report the cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatron_port.model.build import BuildContext
from megatron_port.model.gpt import GPTStage
from megatron_port.model.shared_layers import Held, SharedLayers, shared_layers
from megatron_port.parallel.buffers import recorded_buffers
from megatron_port.parallel.distillation import Objective, vocab_parallel_distillation
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import ParameterRecord, record_of
from megatron_port.parallel.step import StepContext
from megatron_port.parallel.stored_teacher import Stored

PREFIX = "teacher."
"""Before the names of the teacher's parameters."""
SUMS = ("cross_entropy", "teacher_kl")
"""Names of the sums of a step over its tokens."""


class DistilledStage(GPTStage):
    """A stage that learns from a teacher (``GPTStage``).

    Args:
        teacher: the teacher's stage of the same number, with its stream; None: a file has what it predicts.
        objective: the loss of a token.
    """

    def __init__(
        self, build: BuildContext, *, start: int, stop: int, virtual: int | None = None,
        table: nn.Parameter | None = None, shared: SharedLayers | None = None, held: Held | None = None,
        teacher: GPTStage | None, objective: Objective,
    ) -> None:
        super().__init__(build, start=start, stop=stop, virtual=virtual, table=table, shared=shared, held=held)
        self.objective, self.teacher = objective, teacher
        self.auxiliary_names = (*self.auxiliary_names, *SUMS)
        self._judged: torch.Tensor | None = None
        for unit in () if teacher is None else teacher.units:
            unit.training_only, unit.backward_reads_weights = True, False  # type: ignore[assignment]

    @property
    def units(self) -> list[nn.Module]:
        """Units in the order of their passes: the model's, then the teacher's, then what ``loss_sum`` calls."""
        own, further = super().units, len(self.predictions)
        at = len(own) - further
        return [*own[:at], *([] if self.teacher is None else self.teacher.units), *own[at:]]

    @property
    def row_exchanges(self) -> int:
        """Exchanges of rows between expert-parallel ranks in a forward pass, the teacher's among them."""
        return super().row_exchanges + (0 if self.teacher is None else self.teacher.row_exchanges)

    def forward(  # type: ignore[override]  # between stages two tensors pass
        self, x: torch.Tensor, other: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        out: torch.Tensor = super().forward(x)
        if self.teacher is None or not self.training:
            return out
        judged = self._teach(x if other is None else other.view(self.dtype))
        if self.last:
            self._judged = judged
            return out
        # As bytes: what is no floating-point number has no gradient, and none is sent back.
        return out, judged.contiguous().view(torch.uint8)

    def _teach(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the teacher's stage makes of what it reads."""
        assert self.teacher is not None
        context, stream = self.stream.current, self.teacher.stream
        if context is not None:
            stream.current = replace(context, auxiliary=None, tallies=None, routes=None, kept={})
        with torch.no_grad():
            out: torch.Tensor = self.teacher(x)
        return out

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Sum of the token losses of a micro-batch; in evaluation of the cross-entropies alone (last stage only)."""
        if not self.training:
            return super().loss_sum(logits, labels, mask)
        if self.head is None or self.stream.current is None:
            raise ValueError("loss_sum on a stage without the head, or before a micro-batch was announced")
        record, context = record_of(self.head.weight), self.stream.current
        found = vocab_parallel_distillation(
            logits, labels.t(), self._target(context), self.objective, offset=record.offset[0], extent=record.extent[0],
            group=self.head.group,
        )
        loss, *parts = (x.t() if mask is None else x.t() * mask for x in found)
        for name, part in zip(SUMS, parts):
            context.add_auxiliary(name, part.sum())
        return loss.sum()

    def _target(self, context: StepContext) -> torch.Tensor | Stored:
        """Return what the teacher predicts of the micro-batch in flight, [seq, batch, …]."""
        if self.teacher is None:
            if context.stored is None:
                raise ValueError("a micro-batch without what the teacher's file keeps of its labels")
            return context.stored.map(lambda x: x.transpose(0, 1).contiguous())
        judged, self._judged = self._judged, None
        if judged is None:
            raise RuntimeError("the loss before a forward pass of the teacher, or twice after it")
        return judged

    def boundary(self, batch: int, seq: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the name → (shape, dtype) of each tensor that passes between stages."""
        out = super().boundary(batch, seq)
        if self.teacher is not None and self.training:
            ((*shape, width), dtype), = self.teacher.boundary(batch, seq).values()
            out["teacher"] = (*shape, width * dtype.itemsize), torch.uint8
        return out


def build_distilled(
    build: BuildContext, layers_by_chunk: Sequence[int], objective: Objective,
    teacher: tuple[BuildContext, Sequence[int]] | None,
) -> list[GPTStage]:
    """Build this rank's chunks, given the number of layers of each virtual stage, of the model and of the teacher."""
    topology, chunks = build.ctx.topology, list[GPTStage]()
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
        beside = None if teacher is None else made(GPTStage, *teacher, virtual)
        if beside is not None:
            freeze(beside)
        pair = partial(DistilledStage, teacher=beside, objective=objective)
        chunks.append(made(pair, build, layers_by_chunk, virtual))
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


def silent_stream(stream: DropoutStream) -> DropoutStream:
    """Return a stream for a teacher: of the same run, without dropout."""
    out = DropoutStream(stream.seed, stream.device)
    out.enabled = False
    return out


def distillation_means(auxiliary: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Return the means over a step's tokens by their names in metrics.jsonl; nothing where there is no teacher."""
    return {name: auxiliary[name] / tokens for name in SUMS if name in auxiliary and tokens}
