"""A model on this rank for forward passes only: generation and scoring, split over tensor ranks and stages.

Sequence parallelism, recompute and virtual stages are left out: they save memory in training and change no number.
Context-parallel ranks divide the positions of whole sequences, prompts and texts, between them; a new token, which is
one position, is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_port.core.config.schema import ActivationsConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.dataset import Sample, document_starts
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.data.loader import RankView
from megatron_port.core.dist.agree import agree, agreed
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.positions import Positions
from megatron_port.core.dist.record import BUFFER, StateReader, record_of
from megatron_port.core.engine.api import Engine
from megatron_port.core.engine.loss_reduction import summed_over_replicas
from megatron_port.core.engine.module import read_local, recorded_parameters
from megatron_port.core.errors import ConfigError, DataError, PortError
from megatron_port.core.io.logging import Advance, silent
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.shapes import fingerprint
from megatron_port.core.pipeline.runner import Boundary, StageLink
from megatron_port.core.train.hooks import Session
from megatron_port.ext.corpora.packing import PADDING
from megatron_port.ext.mixers.recurrent_spec import RecurrentSpec
from megatron_port.ext.objectives.pairs import ReferenceHeader, check_pairs, read_header, write_reference
from megatron_port.run.build import DTYPES, build_engine, build_model
from megatron_port.run.weights import Weights
from megatron_port.tools.inference.cache import CacheSlot, KeyValueCache

# Perplexity of a corpus, by an engine's ``eval_step``: any layout, either engine.
#
# A stream of tokens is cut into windows of ``model.seq_length`` that begin every ``stride`` tokens; of each but the
# first only the last ``stride`` predictions count, so every token but the very first is predicted exactly once. With
# a stride below the window each has at least ``seq_length - stride`` tokens before it, at ``seq_length / stride``
# times the cost. What training leaves out of its loss, and what it does not let a token see, is left out here too:
# labels that a corpus' mask does not count, and other documents under ``attention_documents = "within"``.

Stream = Callable[[int, int], np.ndarray]
"""``stream(position, count)`` → something of so many tokens from a position on."""


class Samples(Protocol):
    """Samples in stored order: :class:`StreamWindows`, or a dataset of training."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample:
        """Return sample ``index``."""

    def starts(self, index: int) -> np.ndarray | None:
        """Return the ``starts`` of sample ``index`` without reading its tokens."""


MICRO_BATCHES = 16
"""In one ``eval_step``."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a corpus."""

    loss: float
    """Nats per token."""
    tokens: int
    """Predictions counted."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, size: int) -> float:
        """Return bits per byte for a text of ``size`` bytes."""
        return self.loss * self.tokens / math.log(2) / size


def windows(tokens: int, seq_length: int, stride: int) -> int:
    """Return the number of windows over a stream of ``tokens``."""
    return 1 + max(0, -(-(tokens - 1 - seq_length) // stride))


def perplexity(
    engine: Engine, ctx: ParallelContext, samples: Samples, *, view: RankView, micro_batch_size: int,
    advance: Advance = silent,
) -> Perplexity:
    """Return the mean loss over the labels that count. Collective, the same on all ranks.

    Args:
        view: this rank's part of each micro-batch.
        advance: called with the samples that are done.

    Raises:
        DataError: an id that the model does not have, or no label counts.
    """
    total, counted, done = 0.0, 0, 0
    for step in sample_steps(samples, ctx, view, micro_batch_size):
        result = engine.eval_step(step)
        total, counted = total + result.loss_sum, counted + result.tokens
        done += len(step) * micro_batch_size * ctx.size("dp")
        advance(min(done, len(samples)), len(samples))
    if not counted:
        raise DataError("no token counts: all are masked, as those that an assistant has not written")
    return Perplexity(total / counted, counted)


def misplaced_token(tokens: Sequence[int] | np.ndarray, vocab_size: int, position: int = 0) -> str:
    """Return a sentence about the first of ``tokens``, which begin at ``position``, that has no row in the embedding,
    or nothing. A GPU does not look: it would write outside of the table, or tensor-parallel ranks take it for 0."""
    ids = np.asarray(tokens)
    if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return ""
    at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    return (f"position {position + at} has token {int(ids[at])}, which is outside the model's vocabulary of "
            f"{vocab_size}; was it made with this model's tokenizer?")


@dataclass(frozen=True)
class StreamWindows:
    """Windows of a stream. Raises DataError: fewer than 2 tokens, or a stride beyond the window."""

    stream: Stream
    tokens: int
    seq_length: int
    vocab_size: int
    stride: int = 0
    """0: seq_length."""
    counted: Stream | None = None
    """bool [count]: whether tokens count as labels."""
    documents: Stream | None = None
    """int64: offsets at which documents start among the tokens."""

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise DataError(f"{self.tokens} tokens: at least 2 are needed, one to predict from and one to predict")
        if not 0 <= self.stride <= self.seq_length:
            raise DataError(f"a stride of {self.stride} is not between 1 and model.seq_length {self.seq_length}")

    @property
    def _step(self) -> int:
        return self.stride or self.seq_length

    def __len__(self) -> int:
        return windows(self.tokens, self.seq_length, self._step)

    def sample(self, index: int) -> Sample:
        start = index * self._step
        length = min(self.seq_length + 1, self.tokens - start)
        ids, counted = np.zeros(self.seq_length + 1, np.int64), np.zeros(self.seq_length, bool)
        found = self.stream(start, length)
        if wrong := misplaced_token(found, self.vocab_size, start):
            raise DataError(f"the corpus: {wrong}")
        ids[:length] = found
        new = slice(0 if index == 0 else self.seq_length - self._step, length - 1)
        counted[new] = True if self.counted is None else self.counted(start + 1, length - 1)[new]
        return Sample(ids, self.starts(index), counted)

    def starts(self, index: int) -> np.ndarray | None:
        if self.documents is None:
            return None
        start = index * self._step
        return document_starts(self.documents(start, min(self.seq_length, self.tokens - start)), self.seq_length)


def sample_steps(
    samples: Samples, ctx: ParallelContext, view: RankView, size: int
) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of this replica, as many on each, :data:`MICRO_BATCHES` at a time; of samples beyond the
    last one, which fill up, nothing counts."""
    replicas, own = ctx.size("dp"), ctx.index("dp")
    rounds = -(-len(samples) // (size * replicas))
    for first in range(0, rounds, MICRO_BATCHES):
        yield [
            _micro_batch(samples, tuple((m * replicas + own) * size + i for i in range(size)), view)
            for m in range(first, min(first + MICRO_BATCHES, rounds))
        ]


def _micro_batch(samples: Samples, ids: tuple[int, ...], view: RankView) -> MicroBatch:
    """Return this rank's part of some samples; of those beyond the last one nothing counts."""
    here = [min(i, len(samples) - 1) for i in ids]
    if not view.reads:
        return view.micro_batch(ids, None, starts=map(samples.starts, here), labels_masked=True)
    drawn = [samples.sample(i) for i in here]
    both = np.stack([s.tokens for s in drawn])
    counts = torch.ones(len(ids), both.shape[1] - 1)
    for row, sample, index in zip(counts, drawn, ids):
        if index >= len(samples):
            row.zero_()
        elif sample.counted is not None:
            row *= torch.from_numpy(sample.counted)
    return view.micro_batch(ids, both, mask=counts, starts=(s.starts for s in drawn), labels_masked=True)


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
        self.in_step = bool(mesh.dims("dp") & mesh.dims("ep"))
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
        if group is not None and mesh.dims("cp") & mesh.dims("ep"):
            dist.broadcast(drawn, src=mesh.first(self.ctx.rank, mesh.dims("cp")), group=group)
        return drawn

    @property
    def vocabulary(self) -> tuple[int, int]:
        """(first id, how many) of this rank's slice; last stage only."""
        record = record_of(self.stage.head.weight)  # type: ignore[union-attr]
        return record.offset[0], record.extent[0]

    def padded(self, length: int) -> int:
        """Return the shortest length of sequences that the context-parallel ranks divide evenly, ``length`` or more,
        with as many positions in each chunk as a convolution reads. What is behind a token changes nothing for it."""
        chunks, layers = self.stage.partition.chunks, model_spec(self.model).layers
        mixers = [part for layer in layers for part in layer.mixer.parts]
        read = [mixer.kernel - 1 for mixer in mixers if isinstance(mixer, RecurrentSpec)] if chunks > 1 else []
        return max(-(-length // chunks), *read, 0) * chunks

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
        if cache is not None and not decoding and rows is not None:
            cache.lengths = torch.tensor(list(rows), device=self.ctx.device) + 1
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


# The reference of a loss of pairs: log-probabilities of a corpus' answers by a frozen model, computed ahead.
#
# Each document is evaluated by itself, on any layout of engine native, so what is stored is a function of it alone.

ROUND = 64
"""Positions; the longest document is rounded up to a multiple of this."""


@dataclass(frozen=True)
class WholeDocuments:
    """Each document of a corpus as a sample of its own, padded at its end.

    Raises:
        DataError: a document is longer than a sample; on reading, an id that is not below ``vocab_size``.
    """

    corpus: IndexedDataset
    seq_length: int
    vocab_size: int

    def __post_init__(self) -> None:
        lengths = np.diff(self.corpus.document_edges())
        if int(lengths.max(initial=0)) > self.seq_length + 1:
            raise DataError(
                f"{self.corpus.prefix}: document {int(lengths.argmax())} has {int(lengths.max())} tokens, and the "
                f"model reads {self.seq_length} (model.seq_length); prepare again with a smaller --longest-pair"
            )

    def __len__(self) -> int:
        return self.corpus.num_documents

    def sample(self, index: int) -> Sample:
        found = self.corpus.document(index)
        if wrong := misplaced_token(found, self.vocab_size):
            raise DataError(f"{self.corpus.prefix}: document {index}: {wrong}")
        tokens, counted = np.full(self.seq_length + 1, PADDING, np.int64), np.zeros(self.seq_length, bool)
        tokens[: len(found)] = found
        mask = self.corpus.read_mask(self.corpus.document_start(index), len(found))
        counted[: len(found) - 1] = True if mask is None else mask[1:]
        return Sample(tokens, None, counted)

    def starts(self, index: int) -> np.ndarray | None:
        return None


def log_probabilities(
    engine: Engine, ctx: ParallelContext, documents: WholeDocuments, advance: Advance = silent
) -> np.ndarray:
    """Return the log-probability of the counted tokens of each document, float64 [documents]. Collective, the same on
    all ranks."""
    sums = torch.zeros(len(documents), dtype=torch.float64, device=ctx.device)
    for step in sample_steps(documents, ctx, RankView(ctx.is_first_stage, ctx.is_last_stage), 1):
        engine.eval_step(step)
        for batch, loss in zip(step, engine.micro_batch_losses()):
            if batch.sample_ids[0] < len(documents):
                sums[batch.sample_ids[0]] = -loss.double()
        advance(min(1 + step[-1].sample_ids[0], len(documents)), len(documents))
    return summed_over_replicas(sums, ctx).cpu().numpy()


def reference_config(config: RunConfig, prefix: str, overrides: Sequence[str]) -> RunConfig:
    """Return ``config`` with a sequence as long as the longest document, unless the model's table of positions or one
    of ``overrides`` (``a.b=value``) says how long it is.

    Raises:
        ConfigError: another engine, or context parallelism.
        DataError: no corpus of pairs.
    """
    if config.engine != "native" or config.layout.context_parallel_size > 1:
        raise ConfigError(
            f'--reference is for engine native without context parallelism, not engine "{config.engine}" with '
            f"layout.context_parallel_size {config.layout.context_parallel_size}; change them by --set"
        )
    corpus = IndexedDataset(prefix)
    check_pairs([corpus], "dpo")
    given = any(o.replace(" ", "").startswith("model.seq_length=") for o in overrides)
    if given or config.model.position_embedding == "learned":
        return config
    longest = int(np.diff(corpus.document_edges()).max()) - 1
    return replace(config, model=replace(config.model, seq_length=-(-longest // ROUND) * ROUND))


def compute_reference(
    prefix: str, session: Session, weights: Weights, advance: Advance = silent
) -> ReferenceHeader:
    """Compute the log-probabilities of a corpus' answers by ``weights`` and write them beside it. Collective.

    Raises:
        DataError: a document that the model cannot read, or an answer without a log-probability.
    """
    config, corpus = session.config, IndexedDataset(prefix)
    documents = WholeDocuments(corpus, config.model.seq_length, config.model.vocab_size)
    engine = build_engine(config, session.ctx, session.providers, initialise=False)
    engine.load_weights(weights.read)
    sums = log_probabilities(engine, session.ctx, documents, advance)

    def write() -> ReferenceHeader | None:
        return write_reference(
            corpus, sums, weights=str(weights.path), fingerprint=fingerprint(weights.model, weights.read),
            dtype=config.precision.dtype,
        ) if session.is_rank_zero else None

    agreed(write, where=str(session.ctx.coords))
    found = read_header(prefix)
    assert found is not None
    return found
