"""The reference of a loss of pairs: log-probabilities of a corpus' answers by a frozen model, computed ahead.

Each document is evaluated by itself, on any layout of engine native, so what is stored is a function of it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.data.packing import PADDING
from megatron_port.core.data.rank_view import RankView
from megatron_port.core.data.sample import Sample
from megatron_port.core.dist.agreement import agreed
from megatron_port.core.dist.context import ParallelContext
from megatron_port.core.dist.work import Advance, silent
from megatron_port.core.engine.api import Engine
from megatron_port.core.engine.loss_reduction import summed_over_replicas
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.ext.objectives.pairs import check_pairs
from megatron_port.ext.objectives.reference_losses import ReferenceHeader, read_header, write_reference
from megatron_port.ext.weights.base_weights import fingerprint
from megatron_port.run.build import build_engine
from megatron_port.run.session import Session
from megatron_port.run.weights import Weights
from megatron_port.tools.inference.perplexity import sample_steps

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
        if int(found.max(initial=0)) >= self.vocab_size:
            raise DataError(f"{self.corpus.prefix}: document {index} has token {int(found.max())}, the model "
                            f"{self.vocab_size}; was it made with this model's tokenizer?")
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
    check_pairs([corpus], wanted=True)
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
