"""A model on this rank for forward passes only: generation and scoring, split over tensor ranks and stages.

Sequence parallelism, recompute and virtual stages are left out: they save memory in training and change no number.
Context-parallel ranks divide the positions of whole sequences, prompts and texts, between them; a new token, which is
one position, is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_port.core.config.schema import ActivationsConfig
from megatron_port.core.dist.agreement import agree
from megatron_port.core.dist.buffers import recorded_buffers
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.positions import Positions
from megatron_port.core.dist.record import record_of
from megatron_port.core.dist.state import BUFFER, StateReader
from megatron_port.core.engine.module import read_local, recorded_parameters
from megatron_port.core.errors import PortError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.gpt import GPTStage
from megatron_port.core.pipeline.boundary import Boundary
from megatron_port.core.pipeline.transfer import StageLink
from megatron_port.run.build import DTYPES, build_model
from megatron_port.run.session import Session
from megatron_port.tools.inference.kv_cache import CacheSlot, KeyValueCache


class InferenceModel:
    """Model for inference. Collective: the ranks of one copy (tp × cp × pp) call the same methods with the same
    arguments.

    Replicas (dp) are independent of one another, except those that share experts (``in_step``): they run as many
    passes, each with texts of its own.

    Raises:
        CheckpointError: on every rank: ``read`` found damage or another model.
    """

    def __init__(self, session: Session, read: StateReader) -> None:
        self.ctx, config = session.ctx, session.config
        mesh = self.ctx.mesh
        self.in_step = bool(mesh.factors("dp") & mesh.factors("ep"))
        layout = replace(config.layout, sequence_parallel=False, virtual_pipeline_size=1, cp_method="gather")
        model = replace(config.model, mtp_layers=0)  # which predict further tokens in training alone
        self.config = replace(config, layout=layout, activations=ActivationsConfig(), model=model)
        self.model = model
        stream = DropoutStream(0, self.ctx.device)
        stream.enabled = False
        self.stage: GPTStage
        (self.stage,) = build_model(self.config, self.ctx, session.providers, StepSlot(stream))
        self.stage.eval()
        self.cache = CacheSlot()
        self.cache.install(self.stage, self.ctx.over("cp"))
        failure: PortError | None = None
        try:
            for record, parameter in recorded_parameters(self.stage):
                read_local(read, record, "weight", parameter)
            for record, buffer in recorded_buffers(self.stage):
                read_local(read, record, BUFFER, buffer)
        except PortError as error:
            failure = error
        agree(failure, where=str(self.ctx.coords))
        self.link = StageLink(self.ctx)
        self.dtype = DTYPES[config.precision.dtype]
        self.first, self.last = self.link.previous is None, self.link.next is None

    def batches(self, count: int, batch_size: int) -> int:
        """Return how many batches this replica runs when the replicas take ``count`` texts in turn. Where they share
        experts, all run as many: whoever has no more texts still computes for the others' rows."""
        first = 0 if self.in_step else self.ctx.index("dp")
        return -(-len(range(first, count, self.ctx.size("dp"))) // batch_size)

    def any_in_step(self, here: bool) -> bool:
        """Return whether ``here`` is true on this replica or on one that shares its experts."""
        if not self.in_step:
            return here
        found = torch.tensor(int(here), device=self.ctx.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.ctx.over("ep"))
        return bool(found.item())

    def one_choice(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return the tokens int64 [batch] that the first context-parallel rank drew. Where these ranks share experts,
        each expert sees their rows at other places of one product, whose last bits may differ."""
        group, mesh = self.ctx.over("cp"), self.ctx.mesh
        if group is not None and mesh.factors("cp") & mesh.factors("ep"):
            dist.broadcast(drawn, src=mesh.first(self.ctx.rank, mesh.factors("cp")), group=group)
        return drawn

    @property
    def vocabulary(self) -> tuple[int, int]:
        """(first id, how many) of this rank's slice; last stage only."""
        record = record_of(self.stage.head.weight)  # type: ignore[union-attr]
        return record.offset[0], record.extent[0]

    def padded(self, length: int) -> int:
        """Return the shortest length of sequences that the context-parallel ranks divide evenly, ``length`` or more.
        What is behind a token changes nothing for it."""
        chunks = self.stage.partition.chunks
        return -(-length // chunks) * chunks

    def held(self, length: int) -> Positions:
        """Return which positions of whole sequences of this :meth:`padded` length this rank computes."""
        return self.stage.partition.held(length)

    @torch.no_grad()
    def logits(
        self, tokens: torch.Tensor, *, cache: KeyValueCache | None = None, rows: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """Return this rank's columns of the logits on the last stage, None elsewhere.

        Args:
            tokens: int64 [batch, seq], the same on all ranks; of a :meth:`padded` length, or one token of each sequence
                under a filled cache.
            cache: read and filled.
            rows: of each sequence only the position given, on every context-parallel rank: [1, batch, columns] instead
                of [held, batch, columns].
        """
        batch, stage = len(tokens), self.stage
        decoding = cache is not None and cache.positions is not None
        held = Positions.contiguous(1) if decoding else self.held(tokens.shape[1])
        x = held.take(tokens, dim=1).to(self.ctx.device)
        if self.link.previous is not None:
            # A stage states what passes for whole sequences.
            tensors = stage.boundary(batch, self.padded(1)).items()
            shapes = {name: ((held.count, *shape[1:]), dtype) for name, (shape, dtype) in tensors}
            (x,) = self.link.receive(Boundary.of(shapes), self.link.previous)
        with nullcontext() if cache is None else self.cache.using(cache):
            if stage.embedding is not None:
                x = stage.embedding(x)
            for layer in stage.layers:
                x = layer(x)
        if self.link.next is not None:
            self.link.send((x,), self.link.next)
            self.link.drain()
            return None
        if rows is not None:
            x = self._rows(x, torch.tensor(list(rows), device=x.device), held)
        assert stage.head is not None
        out: torch.Tensor = stage.head(x)
        return out

    def _rows(self, x: torch.Tensor, at: torch.Tensor, held: Positions) -> torch.Tensor:
        """Return [1, batch, hidden]: of each sequence the position ``at``, int64 [batch], from the rank that has it."""
        index, group = held.index(x.device), self.ctx.over("cp")
        place = torch.searchsorted(index, at).clamp(max=held.count - 1)
        found = x[place, torch.arange(len(at), device=x.device)]
        if group is not None:
            found = torch.where((index[place] == at)[:, None], found, 0.0)
            dist.all_reduce(found, group=group)
        return found[None]

    def over_context(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the context-parallel ranks, in place."""
        group = self.ctx.over("cp")
        if group is not None:
            dist.all_reduce(value, group=group)
        return value

    def gather_logits(self, local: torch.Tensor) -> torch.Tensor:
        """Return all tensor-parallel ranks' logits [..., vocab] in float32 (float64 stays); last stage only."""
        local = local if local.dtype == torch.float64 else local.float()
        group = self.ctx.over("tp")
        if group is not None:
            local = local.contiguous()
            parts = [torch.empty_like(local) for _ in range(self.ctx.size("tp"))]
            dist.all_gather(parts, local, group=group)
            local = torch.cat(parts, dim=-1)
        return local[..., : self.model.vocab_size]

    def from_last_stage(self, value: torch.Tensor) -> torch.Tensor:
        """The last stage's ``value`` on every stage; the others bring one of its shape and dtype."""
        group = self.ctx.reverse_group or self.ctx.over("pp")
        if group is None:
            return value
        value = value.contiguous()
        dist.broadcast(value, src=self.ctx.topology.stage_peer(self.ctx.rank, self.ctx.topology.pp - 1), group=group)
        return value

    def over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the replicas, in place; for results that each has a part of, zeros elsewhere. Ranks that share the
        positions of a sequence have the same results, of which the first one's count."""
        group = self.ctx.over(*REPLICAS)
        if group is not None:
            dist.all_reduce(value.zero_() if self.ctx.index("cp") else value, group=group)
        return value
