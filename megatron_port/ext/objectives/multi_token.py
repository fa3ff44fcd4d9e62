"""Loss of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): each depth's modules
(``objectives.multi_token``) predict, in training, one token further ahead.

Position i of a sample has token t_i and label t_(i+1). At depth k it reads token t_(i+k) and predicts the label of
position i + k. Depth 0 is the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective, WholeSamples
from megatron_port.core.layers.embedding import VocabParallelEmbedding
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.layers import Head, Norm, TransformerLayer, embedding_factor
from megatron_port.core.model.spec import HeadSpec, PredictionSpec

_LOSS = "mtp_loss_"
"""Before the depth, in the names of sums."""
TOKENS, LABELS, COUNTED = "mtp_tokens", "mtp_labels", "mtp_counted"
"""Side tensors, where context-parallel ranks lack the tokens after their own: :func:`tokens_ahead`,
:func:`labels_ahead` and :func:`counted_ahead` of each depth, [batch, seq, depths]."""


class MultiTokenObjective(Objective):
    """The mean token loss, and the mean of the depths' mean losses times ``mtp_weight``, which the reported loss leaves
    out. What contradicts it is in ``objectives_settings.MULTI_TOKEN``."""

    side_layout = MappingProxyType(dict.fromkeys((TOKENS, LABELS, COUNTED), "position"))

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.terms, self.weight = config.model.mtp_layers, config.model.mtp_weight
        self.sums = tuple(f"{_LOSS}{depth}" for depth in range(1, self.terms + 1))

    def side(self, samples: WholeSamples) -> dict[str, torch.Tensor]:
        """Return what the depths read and predict, of samples that ranks divide; others' labels tell it."""
        return look_ahead(samples.labels, samples.mask, samples.starts, self.terms) if samples.divided else {}

    def term_counts(self, batch: MicroBatch, *, divided: bool) -> torch.Tensor:
        """Return the tokens that count at each depth."""
        if COUNTED in batch.side:
            return batch.side[COUNTED].sum(dim=(0, 1)).cpu()
        if divided:
            raise ValueError(f"MicroBatch.side lacks {COUNTED}: context-parallel ranks lack the tokens after their own")
        assert batch.labels is not None  # on the last stage
        shape = batch.labels.shape[0], batch.labels.shape[1]
        return torch.stack([
            counted_ahead(
                depth + 1, shape, mask=batch.loss_mask, starts=batch.document_starts, device=batch.labels.device
            ).sum() for depth in range(self.terms)
        ]).cpu()

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return the sum of the model's own token losses; in training its gradient is also that of the depths'."""
        total = super().loss(stage, logits, labels, mask, context)
        if not (stage.predictions and stage.training and torch.is_grad_enabled()):
            return total
        assert context is not None  # the engine has said which micro-batch it is
        further = self._further_losses(stage, labels, mask, context)
        return total + (further - further.detach())

    def _further_losses(
        self, stage: GPTStage, labels: torch.Tensor, mask: torch.Tensor | None, context: StepContext
    ) -> torch.Tensor:
        """Return what the depths add to a micro-batch's sum of token losses: a scalar.

        Each depth has a mean over its own tokens of the step, fewer than the model's. The step's mean is this sum over
        the model's tokens, so what is added is ``mtp_weight`` / depths of the mean, times these.
        """
        head, total = stage.head, None
        assert head is not None
        hidden, counts = head.take_hidden(), context.term_counts  # the head has run before
        ahead = context.side or look_ahead(labels, mask, context.document_starts, len(counts))
        tokens, targets, counted = ([x.contiguous() for x in ahead[k].unbind(-1)] for k in (TOKENS, LABELS, COUNTED))
        for depth, (part, count) in enumerate(zip(stage.predictions, counts, strict=True)):
            hidden = part(hidden, tokens[depth])
            losses = (_losses(head, hidden, targets[depth]) * counted[depth]).sum()
            mean = losses / max(count, 1.0)
            context.add_auxiliary(self.sums[depth], mean)
            added = mean * (self.weight / len(counts) * context.global_tokens)
            total = added if total is None else total + added
        assert total is not None
        return total

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float | None]:
        """Return the mean over depths of a step's mean losses; a depth without any token has added none."""
        found = [sums[name] for name in self.sums if sums[name] != 0.0]
        return {"mtp_loss": sum(found) / len(found) if found else None}


def _losses(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token [batch, seq] from the normed hidden states of a depth [seq(/tp), batch, hidden]."""
    if head.defers:
        found: torch.Tensor = head.further_losses(hidden, labels)
        return found
    found = head.token_losses(head.logits(head.scaled(hidden)), labels)
    return found


def tokens_ahead(labels: torch.Tensor, depth: int) -> torch.Tensor:
    """Return the tokens that depth ``depth`` (from 1) reads, int64 [batch, seq]; 0 where there is none.

    ``labels``: of the model, int64 [batch, seq]; those that do not count are tokens as well.
    """
    return labels_ahead(labels, depth - 1)


def labels_ahead(labels: torch.Tensor, depth: int) -> torch.Tensor:
    """Return the labels of depth ``depth``, int64 [batch, seq]; 0 where the sample has ended."""
    return F.pad(labels[:, depth:], (0, depth))


def counted_ahead(
    depth: int, shape: tuple[int, int], *, mask: torch.Tensor | None, starts: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Return 1 where a label of depth ``depth`` counts, else 0: float32 [batch, seq].

    It counts where the label of that many positions on counts, in the same sample and the same document: a position
    reads no token of another document, as its attention does not. So depth 0 counts what the model does.

    Args:
        shape: (batch, seq).
        mask: which of the model's labels count; None: all.
        starts: where the document of each position starts; None: a sample is one document.
    """
    found = torch.ones(shape, device=device) if mask is None else mask.to(device)
    found = found[:, depth:]
    if starts is not None:
        found = found * (starts[:, depth:] == starts[:, : shape[1] - depth]).to(found.dtype)
    return F.pad(found, (0, depth))


def look_ahead(
    labels: torch.Tensor, mask: torch.Tensor | None, starts: torch.Tensor | None, depths: int
) -> dict[str, torch.Tensor]:
    """Return the side tensors of ``depths`` depths at all positions of whole samples; arguments as in
    :func:`counted_ahead`."""
    shape, numbers = (labels.shape[0], labels.shape[1]), range(1, depths + 1)
    return {
        TOKENS: torch.stack([tokens_ahead(labels, depth) for depth in numbers], dim=-1),
        LABELS: torch.stack([labels_ahead(labels, depth) for depth in numbers], dim=-1),
        COUNTED: torch.stack([
            counted_ahead(depth, shape, mask=mask, starts=starts, device=labels.device) for depth in numbers
        ], dim=-1),
    }


# Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the head that predict, in
# training, one token further ahead each.
#
# Module k takes the hidden state of each position at depth k - 1 and the token k places on, and predicts the one
# after that; ``objectives.multi_token`` has the loss. A hidden state is what the head's matrix is multiplied with,
# hence behind the norm, at depth 0 too: so does inference with the published weights. The paper puts the hidden state
# before the embedding, those weights after it.

class Prediction(nn.Module):
    """One module: hidden states [seq(/tp), batch, hidden] of the depth before → those of its own, whose losses the
    model's head makes.

    ``table``: the token table; ``head``: the model's, whose matrix and bias are this module's as well.
    """

    training_only = True
    """Evaluations leave it out."""

    def __init__(
        self, index: int, spec: PredictionSpec, build: BuildContext, head: Head, table: nn.Parameter
    ) -> None:
        super().__init__()
        name = spec.name
        self.embedding_norm = Norm(name, spec.embedding_norm, build)
        self.hidden_norm = Norm(name, spec.hidden_norm, build)
        self.projection = build.whole(name, spec.projection)
        self.layer = TransformerLayer(build.model.num_layers + index, spec.layer, build, name=f"{name}.layer")
        self.norm = Norm(name, spec.norm, build)
        self.word = VocabParallelEmbedding(table, ctx=build.ctx, sequence_parallel=build.sequence_parallel)
        self.multiplier = embedding_factor(build)
        # The losses of this module's result read these right after its pass: they are gathered with its own.
        self.shared = nn.ParameterList([head.weight] if head.bias is None else [head.weight, head.bias])

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: int64 [batch, seq]."""
        embedded = self.word(tokens.t().contiguous())
        if self.multiplier != 1.0:
            embedded = embedded * self.multiplier
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        found: torch.Tensor = self.norm(self.layer(self.projection(both)))
        return found


def build_predictions(
    spec: HeadSpec, build: BuildContext, head: Head, embedding: nn.Parameter | None
) -> list[Prediction]:
    """Build the modules of a model. ``embedding``: the token table where this rank has it for the embedding; else the
    head's matrix is the same table, or the modules have a tied copy."""
    table = embedding
    if table is None:
        table = head.weight if spec.table is None else build.table(spec.table, tied_apart=True, primary=False)
    return [Prediction(i, part, build, head, table) for i, part in enumerate(spec.predictions)]
