"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the head that predict, in
training, one token further ahead each.

Module k takes the hidden state of each position at depth k - 1 and the token k places on, and predicts the one after
that; ``objectives.multi_token`` has the loss. A hidden state is what the head's matrix is multiplied with, hence behind
the norm, at depth 0 too: so does inference with the published weights. The paper puts the hidden state before the
embedding, those weights after it.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron_port.core.layers.embedding import VocabParallelEmbedding
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.layers import Head, TransformerLayer, embedding_factor
from megatron_port.core.model.norm import Norm
from megatron_port.core.model.spec import HeadSpec, PredictionSpec


class Prediction(nn.Module):
    """One module: hidden states [seq(/tp), batch, hidden] of the depth before → (those of its own, its logits).

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
        # What the pass reads of the head is to be gathered for this module too.
        self.shared = nn.ParameterList([head.weight] if head.bias is None else [head.weight, head.bias])

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, head: Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``tokens``: int64 [batch, seq]."""
        embedded = self.word(tokens.t().contiguous())
        if self.multiplier != 1.0:
            embedded = embedded * self.multiplier
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        found = self.norm(self.layer(self.projection(both)))
        return found, head.logits(head.scaled(found))


def build_predictions(
    spec: HeadSpec, build: BuildContext, head: Head, embedding: nn.Parameter | None
) -> list[Prediction]:
    """Build the modules of a model. ``embedding``: the token table where this rank has it for the embedding; else the
    head's matrix is the same table, or the modules have a tied copy."""
    table = embedding
    if table is None:
        table = head.weight if spec.table is None else build.table(spec.table, tied_apart=True, primary=False)
    return [Prediction(i, part, build, head, table) for i, part in enumerate(spec.predictions)]
