"""The units of the pipeline: embedding, transformer layers, head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_port.core.layers import fused
from megatron_port.core.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.core.layers.embedding import VocabParallelEmbedding, position_rows, table_rows
from megatron_port.core.layers.fused import torch_layer_norm, torch_rms_norm
from megatron_port.core.layers.linear import linear
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.program import Program, Watch
from megatron_port.core.model.spec import EmbeddingSpec, HeadSpec, LayerSpec, NormSpec

# LayerNorm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang & Sennrich, arXiv 1910.07467).

class Norm(nn.Module):
    """Norm over the last dimension of a tensor, e.g. [seq(/tp), batch, hidden].

    The parameters are replicated over tp. Where a rank sees only its tokens (sequence parallelism) or only its heads,
    their gradients are partial sums over tp, and their records are marked partial. Zero-centred ones multiply by
    1 + weight, which is formed in the weight's dtype.
    """

    def __init__(self, layer: str, spec: NormSpec, build: BuildContext) -> None:
        super().__init__()
        self.gradient, self.zero_centered = spec.gradient, spec.zero_centered
        self.kind, self.eps, self.providers = spec.kind, spec.epsilon or build.model.norm_epsilon, build.providers
        # torch's norms add first, with the same bits.
        self.fuses_add = self._norm not in (torch_layer_norm, torch_rms_norm)
        weight, *bias = (build.divided(p, layer) for p in spec.parameters)
        self.weight: nn.Parameter = weight
        self.bias: nn.Parameter | None = bias[0] if bias else None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, by: fused.NormOp | None = None,
        pair: bool = False,
    ) -> Any:
        """Return the norm of x + residual; with ``pair``, (norm of x + residual, x + residual).

        ``by``: what computes it; None: the provider. All ways to a norm lead through here, so that a module's hooks see
        it (``health.probe``).
        """
        both = self._run(x, residual) if by is None else by(x, residual, self.gain(self.weight), self.bias, self.eps)
        return both if pair else both[0]

    def fork(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of x, x); use the second in place of x: a provider may add both gradients in one pass."""
        both: tuple[torch.Tensor, torch.Tensor] = self(x, pair=True)
        return both

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, *, by: fused.NormOp | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of x + residual, x + residual), in one pass where the provider, or ``by``, can."""
        both: tuple[torch.Tensor, torch.Tensor] = self(x, residual, by=by, pair=True)
        return both

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, self.gain(self.weight), self.bias, self.eps)

    def gain(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what normed features are multiplied by."""
        return weight + 1 if self.zero_centered else weight

    @property
    def _norm(self) -> fused.NormOp:
        return self.providers.rms_norm if self.kind == "rmsnorm" else self.providers.layer_norm


def embedding_factor(build: BuildContext) -> float:
    """Return the factor on embedded tokens."""
    factor = build.model.embedding_multiplier
    if build.model.scale_embedding:  # rounded first, as transformers does
        factor *= float(torch.tensor(build.model.hidden_size**0.5, dtype=build.dtype))
    return factor


class Embedding(nn.Module):
    """Token embedding, learned positions and dropout: tokens int64 [batch, seq] → [seq(/tp), batch, hidden]."""

    backward_reads_weights = False
    """Gradients of lookups need the tokens alone, so ZeRO stage 3 does not gather the table again."""

    def __init__(self, spec: EmbeddingSpec, build: BuildContext) -> None:
        super().__init__()
        self.residual = build.residual
        apart = build.ctx.topology.last_stage != 0  # else the head shares this parameter
        weight = build.table(spec.word, tied_apart=spec.word.tied and apart)
        self.multiplier = embedding_factor(build)
        self.word = VocabParallelEmbedding(weight, ctx=build.ctx, sequence_parallel=build.sequence_parallel)
        self.position = None if spec.position is None else build.unsplit(spec.position)
        self.position_reset = build.position_reset
        self.position_rows: Callable[[Embedding, torch.Tensor], torch.Tensor] = Embedding.own_positions
        """Replaced by inference, where each sequence of a batch may be at another position."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens.t().contiguous())
        if self.position is not None:
            x = x + self.position_rows(self, x)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return self.residual.drop(x, op="embedding")

    def own_positions(self, x: torch.Tensor) -> torch.Tensor:
        """Learned embeddings of the positions of this rank's rows x [rows, batch, hidden], of the same shape."""
        assert self.position is not None
        rows, batch, _ = x.shape
        index = self.document_positions(rows)
        if index is None:
            return position_rows(self.position, self.residual.positions(rows), batch)
        return table_rows(index, self.position)

    def document_positions(self, rows: int) -> torch.Tensor | None:
        """Return this rank's positions counted from each document's start, int [rows, batch]; None: not reset."""
        starts = self.residual.document_starts() if self.position_reset else None
        return None if starts is None else self.residual.positions(rows).index(starts.device)[:, None] - starts


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm x)), then x + dropout(mlp(norm x)); [seq(/tp), batch, hidden].

    ``LayerSpec.ops`` states what it does, and in which order; this module has what computes it. With
    ``parallel_residual`` the second also reads the layer's input (Wang & Komatsuzaki's GPT-J), or the first one's norm
    where it has none of its own. ``post_norm1`` and ``post_norm2`` are norms of what the branches add. ``name``:
    before the names of its parameters; empty: that of the model's layer ``index``.
    """

    def __init__(self, index: int, spec: LayerSpec, build: BuildContext, name: str = "") -> None:
        super().__init__()
        name = name or f"layers.{index}"
        self.name, self.index, self.program = name, index, Program(spec.ops)
        self.watch: Watch | None = None
        """Sees the values of passes that do not recompute."""
        self.residual, self.step, self.recompute = build.residual, build.step, build.recompute("full")
        self.activations = build.layer_activations.get(index)
        """Decisions for what its operations leave behind; None: all is kept."""
        self.parking = build.parking

        def norm(part: NormSpec | None) -> Norm | None:
            return None if part is None else Norm(name, part, build)

        self.norm1 = norm(spec.norm1)
        self.attention = spec.mixer.build(name, build)
        self.post_norm1, self.norm2 = norm(spec.post_norm1), norm(spec.norm2)
        self.mlp = spec.mlp.build(name, index, build)
        self.post_norm2 = norm(spec.post_norm2)

    def biased_attention(self, out: torch.Tensor) -> torch.Tensor:
        """Return the result of attention's last product with its bias, which its norm reads."""
        return self.residual.biased(out, self.attention.output.bias)

    def biased_mlp(self, out: torch.Tensor) -> torch.Tensor:
        """Return the same of the feed-forward block."""
        return self.residual.biased(out, self.mlp.bias)

    def add_attention(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream x with what attention adds, from its normed result or that of its last product."""
        return self.residual.bias_dropout_add(out, self._attention_bias, x, op=f"{self.name}.attention")

    def add_attention_norm2(self, out: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the norm of the sum that ``add_attention`` returns, the sum)."""
        assert self.norm2 is not None
        op = f"{self.name}.attention"
        return self.residual.bias_dropout_add_norm(out, self._attention_bias, x, self.norm2, op=op)

    def add_mlp(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream x with what the feed-forward block adds."""
        bias = self.mlp.bias if self.post_norm2 is None else None
        return self.residual.bias_dropout_add(out, bias, x, op=f"{self.name}.mlp")

    @property
    def _attention_bias(self) -> torch.Tensor | None:
        """Bias that is yet to be added to attention's result."""
        return self.attention.output.bias if self.post_norm1 is None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            if self.recompute is not None:
                return self.recompute(partial(self.program.run, self), x, step=self.step)
            if self.activations:
                tape = self.parking.tape(self.activations, self.step, x)
                try:
                    out = self.program.run(self, x, tape=tape)
                    tape.park(self.index)
                    return out
                finally:
                    tape.close()
        return self.program.run(self, x, self.watch)


class Head(nn.Module):
    """Final norm and projection to the split vocabulary: [seq(/tp), batch, hidden] → [seq, batch, padded_vocab/tp].

    ``shared``: the embedding's parameter when both are on this stage and tied.
    """

    defers = False
    """Whether losses take the stage's activations, not logits, and call the head (``memory.chunked_head``)."""

    def __init__(self, spec: HeadSpec, build: BuildContext, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.group, self.sequence_parallel = build.ctx.over("tp"), build.sequence_parallel
        self.loss, self.cross_entropy, self.z_loss = build.loss, build.providers.cross_entropy, build.z_loss
        self.norm, self.divisor = Norm("", spec.norm, build), build.model.output_divisor
        self.softcap, tied, self.products = build.model.logits_softcap, spec.weight.tied, build.providers.products
        self.weight = shared if shared is not None else build.table(spec.weight, tied_apart=tied, primary=not tied)
        self.bias = None if spec.bias is None else build.vocabulary_bias(spec.bias)
        self._keeps_hidden = bool(spec.predictions)
        self._hidden: torch.Tensor | None = None

    def product_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is multiplied by the table: the norm, divided where logits are (they have more elements).

        A bias of the logits is not divided; config.checks refuses the two together.
        """
        y: torch.Tensor = self.norm(x)
        if self._keeps_hidden and self.training and torch.is_grad_enabled():
            self._hidden = y
        return self.scaled(y)

    def scaled(self, y: torch.Tensor) -> torch.Tensor:
        """Return normed hidden states divided where logits are."""
        return y if self.divisor == 1.0 else y / self.divisor

    def take_hidden(self) -> torch.Tensor:
        """Return the norm of the last forward pass, once, in training of a model that predicts further tokens.

        RuntimeError: there is none.
        """
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise RuntimeError("the loss of further tokens before a forward pass of the head, or twice after it")
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.product_input(x))

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        """Return the logits [seq, batch, padded_vocab/tp] of the product's input."""
        return self.capped(linear(
            y, self.weight, self.bias, group=self.group, sequence_parallel=self.sequence_parallel, kernels=self.products
        ))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits`` within the model's bound, over whose memory the loss may write its gradient."""
        return logits if self.softcap == 0.0 else torch.tanh(logits / self.softcap) * self.softcap

    def token_losses(self, logits: torch.Tensor, labels: torch.Tensor, *, z_loss: float = 0.0) -> torch.Tensor:
        """Return the loss of each token [batch, seq] in nats for ``labels`` int64 [batch, seq].

        Evaluations use the cross-entropy, whatever loss the run trains with. ``z_loss``: factor of log²Z in training.
        """
        record = self.weight.record  # type: ignore[attr-defined]
        loss = self.loss if self.training else vocab_parallel_cross_entropy
        more = {"z_loss": z_loss} if z_loss and self.training else {}  # losses of plugins know nothing of it
        losses = loss(
            logits, labels.t().contiguous(), offset=record.offset[0], extent=record.extent[0],
            group=self.group, ops=self.cross_entropy, **more,
        )
        return losses.t()
