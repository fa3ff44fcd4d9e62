"""GPT as a list of units (embedding, layers, head, modules that predict further tokens), and the stage that holds a
contiguous run of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.layers import Embedding, Head, TransformerLayer
from megatron_port.core.registry import PARTS

Held = dict[tuple[str, tuple[int, ...]], nn.Parameter]
"""Parameters of groups that this rank has built, by name and offset."""


class SharedStages(Protocol):
    """Which stages hold the weights of each group of layers (``weights.shared_layers``)."""

    @property
    def spanning(self) -> tuple[tuple[int, ...], ...]:
        """Sets of stages that hold copies of the same weights, each once."""


def shared_layers(model: ModelConfig, topology: Topology, layers_by_chunk: Sequence[int]) -> SharedStages | None:
    """Return which stages hold each group's weights; None: every layer has its own."""
    found: SharedStages | None = None
    if model.shared_layers > 1:
        found = PARTS.function("stages of shared layers")(model, topology, layers_by_chunk)
    return found


class GPTStage(nn.Module):
    """Layers ``[start, stop)`` of the model, the embedding with the first stage, the head and what follows it with the
    last.

    ``virtual``: which chunk of the model it is, where stages hold several (None: the stage's own number). ``table``:
    the embedding's parameter where another chunk on this rank has it, for those that share it. ``shared``: which stages
    hold layers that share weights (None: this one alone), and ``held`` such weights that this rank has built.

    ``forward``: tokens int64 [batch, seq] on the first stage, else activations
    [seq(/tp), batch, hidden]; returns activations, on the last stage logits [seq, batch,
    padded_vocab/tp], or activations where the head makes its logits in chunks.
    """

    def __init__(
        self, build: BuildContext, *, start: int, stop: int, virtual: int | None = None,
        table: nn.Parameter | None = None, shared: SharedStages | None = None, held: Held | None = None,
    ) -> None:
        super().__init__()
        self.parking, self.weight_copies = build.parking, build.weight_copies
        self.partition, self.hidden_size, self.dtype = build.partition, build.model.hidden_size, build.dtype
        virtual = build.ctx.index("pp") if virtual is None else virtual
        self.first, self.last = virtual == 0, virtual == build.ctx.topology.virtual_stages - 1
        spec, count = model_spec(build.model), build.model.num_layers + build.model.mtp_layers
        self.tally_specs = {
            name: one for layer, _ in spec.all_kinds() for name, one in layer.mlp.tallies(count).items()
        }
        self.embedding = Embedding(spec.embedding, build) if self.first else None
        self.layers = nn.ModuleList(TransformerLayer(i, spec.layers[i], build) for i in range(start, stop))
        if build.model.shared_layers > 1:
            if shared is None and build.ctx.topology.virtual_stages > 1:
                raise ValueError("layers share weights over stages, and nothing says which hold them")
            share = PARTS.function("weight sharing between layers")
            share(self.layers, build.model, shared, build.ctx.index("pp"), {} if held is None else held)
        self.head: Head | None = None
        further: list[nn.Module] = []
        if self.last:
            if self.embedding is not None:
                table = self.embedding.word.weight
            make = PARTS.function("chunked head") if build.head_chunk else Head
            self.head = make(spec.head, build, table if spec.head.weight.tied else None)
            if spec.head.predictions:
                further = PARTS.function("multi-token prediction modules")(spec.head, build, self.head, table)
        self.predictions = nn.ModuleList(further)
        self.objective, self.step, self.context_group = build.objective, build.step, build.ctx.over("cp")
        self.auxiliary_names = self.objective.sums
        self.on_logits: Callable[[torch.Tensor, StepContext], None] | None = None
        """Looks at the logits of each micro-batch before their loss."""

    @property
    def units(self) -> list[nn.Module]:
        """Units in the order of ``forward`` and ``loss_sum``: embedding, layers, head, further predictions."""
        return [m for m in (self.embedding, *self.layers, self.head, *self.predictions) if m is not None]

    @property
    def row_exchanges(self) -> int:
        """Exchanges of rows between ranks in a forward pass, beside which other products may be computed."""
        blocks: list[Any] = [layer.mlp for layer in self.layers]
        found: int = sum(block.exchanges for block in blocks)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parking is not None and self.parking.swap is not None:
            self.parking.swap.begin_pass()
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None or self.head.defers else self.head(x)

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Sum of the losses of a micro-batch by the run's objective, a scalar (last stage only)."""
        if self.head is None:
            raise ValueError("loss_sum on a stage without the head")
        context = self.step.current
        if self.on_logits is not None and context is not None:
            self.on_logits(logits, context)
        return self.objective.loss(self, logits, labels, mask, context)

    def after_update(self, totals: Mapping[str, torch.Tensor], skipped: torch.Tensor) -> None:
        """Let feed-forward blocks change their buffers by the step's tallies, after each step's update."""
        for layer in (*self.layers, *(part.layer for part in self.predictions)):
            layer.mlp.after_update(totals, skipped)

    def boundary(self, batch: int, seq: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the name → (shape, dtype) of each tensor that passes between stages."""
        return {"hidden": ((self.partition.residual(seq).count, batch, self.hidden_size), self.dtype)}


def build_chunks(build: BuildContext, layers_by_chunk: Sequence[int]) -> list[GPTStage]:
    """Build this rank's chunks, given the number of transformer layers of each virtual stage."""
    topology, chunks = build.ctx.topology, []
    table: nn.Parameter | None = None
    shared = shared_layers(build.model, topology, layers_by_chunk)
    held: Held = {}
    for chunk in range(topology.vp):
        virtual = topology.virtual_stage(build.ctx.index("pp"), chunk)
        start = sum(layers_by_chunk[:virtual])
        stage = GPTStage(
            build, start=start, stop=start + layers_by_chunk[virtual], virtual=virtual, table=table, shared=shared,
            held=held,
        )
        if stage.embedding is not None:
            table = stage.embedding.word.weight
        chunks.append(stage)
    return chunks
