"""The units of the pipeline: embedding, transformer layers, head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.model.activation_sites import LayerActivations, Site
from megatron_port.model.attention import SelfAttention
from megatron_port.model.build import BuildContext
from megatron_port.model.latent_attention import LatentAttention
from megatron_port.model.mlp import MLP
from megatron_port.model.norm import Norm
from megatron_port.model.recompute import recompute
from megatron_port.model.site_tape import SiteTape
from megatron_port.model.spec import EmbeddingSpec, HeadSpec, LayerSpec
from megatron_port.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.parallel.embedding import VocabParallelEmbedding
from megatron_port.parallel.linear import linear


class Embedding(nn.Module):
    """Token embedding, learned positions and dropout: tokens int64 [batch, seq] → [seq(/tp), batch, hidden]."""

    backward_reads_weights = False
    """Gradients of lookups need the tokens alone, so ZeRO stage 3 does not gather the table again."""

    def __init__(self, spec: EmbeddingSpec, build: BuildContext) -> None:
        super().__init__()
        self.residual = build.residual
        apart = build.ctx.topology.last_stage != 0  # else the head shares this parameter
        weight = build.table(spec.word, tied_apart=spec.word.tied and apart)
        self.multiplier = build.model.embedding_multiplier
        self.word = VocabParallelEmbedding(weight, ctx=build.ctx, sequence_parallel=build.sequence_parallel)
        self.position = None if spec.position is None else build.unsplit(spec.position)
        self.position_reset = build.position_reset
        self.position_rows: Callable[[Embedding, int], torch.Tensor] = Embedding.own_positions
        """Replaced by inference, where each sequence of a batch may be at another position."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens.t().contiguous())
        if self.position is not None:
            x = x + self.position_rows(self, x.shape[0])
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return self.residual.drop(x, op="embedding")

    def own_positions(self, rows: int) -> torch.Tensor:
        """Learned embeddings of the positions of this rank's ``rows``: [rows, 1, hidden], or [rows, batch, hidden]
        counted from each document's start."""
        assert self.position is not None
        positions, starts = self.residual.positions(rows), self.residual.document_starts()
        if starts is None or not self.position_reset:
            return positions.take(self.position)[:, None, :]
        return F.embedding(positions.index(starts.device)[:, None] - starts, self.position)


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + dropout(attention(norm x)), then x + dropout(mlp(norm x)); [seq(/tp), batch, hidden].

    With ``parallel_residual`` the second also reads the layer's input (Wang & Komatsuzaki's GPT-J).
    """

    def __init__(self, index: int, spec: LayerSpec, build: BuildContext) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.name, self.index, self.parallel_residual = name, index, spec.parallel_residual
        self.residual, self.stream, self.recompute = build.residual, build.stream, build.recompute == "full"
        self.activations = build.layer_activations.get(index, LayerActivations())
        self.parking = build.parking
        self.norm1 = Norm(name, spec.norm1, build)
        kind = SelfAttention if spec.attention.latent is None else LatentAttention
        self.attention = kind(name, spec.attention, build)
        self.norm2 = Norm(name, spec.norm2, build)
        self.mlp = MLP(name, spec.mlp, build)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        join = self.residual.bias_dropout_add
        y, x = self.norm1.fork(x)
        out, bias = self.attention(y), self.attention.output.bias
        if self.parallel_residual:
            y, x = self.norm2.fork(x)
            branch = self.mlp(y)
            x = join(out, bias, x, op=f"{self.name}.attention")
            return join(branch, self.mlp.down.bias, x, op=f"{self.name}.mlp")
        y, x = self.residual.bias_dropout_add_norm(out, bias, x, self.norm2, op=f"{self.name}.attention")
        return join(self.mlp(y), self.mlp.down.bias, x, op=f"{self.name}.mlp")

    def _forward_by_site(self, x: torch.Tensor, tape: SiteTape) -> torch.Tensor:
        """Run the same operations, each under the name of what it leaves behind."""
        join, mlp, attention = self.residual.bias_dropout_add, self.mlp, self.attention
        bias, op = attention.output.bias, f"{self.name}.attention"
        y, x = self._fork(tape, "norm1", self.norm1, x)
        core = tape.run("core", attention.attend_to, *tape.run("qkv", attention.core_arguments, y))

        def add(core: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return join(attention.output(core), bias, x, op=op)

        def add_and_norm(core: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.residual.bias_dropout_add_norm(attention.output(core), bias, x, self.norm2, op=op)[::-1]

        def add_branch(wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return join(mlp.down(wide), mlp.down.bias, x, op=f"{self.name}.mlp")

        if self.parallel_residual:
            y, x = self._fork(tape, "norm2", self.norm2, x)
            x = tape.run("residual", add, core, x)
        elif self.norm2.fuses_add:
            inputs = core, x
            x, y = tape.run_fused(
                add_and_norm, inputs,
                lambda total, y: (("residual", add, inputs), ("norm2", self.norm2, (total,))),
            )
        else:
            x = tape.run("residual", add, core, x)
            y = tape.run("norm2", self.norm2, x)
        wide = tape.run("activation", mlp.activate, tape.run("hidden", mlp.up, y))
        out: torch.Tensor = tape.run("output", add_branch, wide, x)
        return out

    @staticmethod
    def _fork(tape: SiteTape, site: Site, norm: Norm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of x, x), as ``norm.fork`` does; torch's norm has x itself for the second."""
        if not norm.fuses_add:
            return tape.run(site, norm, x), x
        y, same = tape.run_fused(norm.fork, (x,), lambda y, same: ((site, norm, (x,)), None))
        return y, same

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            if self.recompute:
                return recompute(self._forward, x, stream=self.stream)
            if self.activations:
                tape = SiteTape(self.activations, self.stream, x, self.parking)
                try:
                    out = self._forward_by_site(x, tape)
                    tape.park(self.index)
                    return out
                finally:
                    tape.close()
        return self._forward(x)


class Head(nn.Module):
    """Final norm and projection to the split vocabulary: [seq(/tp), batch, hidden] → [seq, batch, padded_vocab/tp].

    ``shared``: the embedding's parameter when both are on this stage and tied.
    """

    def __init__(self, spec: HeadSpec, build: BuildContext, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.group, self.sequence_parallel = build.ctx.over("tp"), build.sequence_parallel
        self.loss, self.cross_entropy = build.loss, build.providers.cross_entropy
        self.norm, self.divisor = Norm("", spec.norm, build), build.model.logits_divisor
        tied = spec.weight.tied
        self.weight = shared if shared is not None else build.table(spec.weight, tied_apart=tied, primary=not tied)

    def product_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is multiplied by the table: the norm, divided where logits are (they have more elements)."""
        y: torch.Tensor = self.norm(x)
        return y if self.divisor == 1.0 else y / self.divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.product_input(x), self.weight, group=self.group, sequence_parallel=self.sequence_parallel)

    def token_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token [batch, seq] in nats for ``labels`` int64 [batch, seq].

        Evaluations use the cross-entropy, whatever loss the run trains with.
        """
        record = self.weight.record  # type: ignore[attr-defined]
        loss = self.loss if self.training else vocab_parallel_cross_entropy
        losses = loss(
            logits, labels.t().contiguous(), offset=record.offset[0], extent=record.extent[0],
            group=self.group, ops=self.cross_entropy,
        )
        return losses.t()
