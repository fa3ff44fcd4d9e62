"""A run's objective: what its loss needs beside tokens and labels, what it is a mean of, and what it reports.

This is the hook from the loader to the loss. Everything between hands ``MicroBatch.side`` on by name and knows none of
its tensors. :class:`Objective` itself is the mean token loss, a next token's cross-entropy or a loss of
``registry.LOSSES``; others derive from it (``megatron_port.ext.objectives``, plugins) and are chosen by
:func:`objective_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from megatron_port.core.config.conflicts import Conflict, Rule
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.dataset import Sample, TokenDataset
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.dist.record import StateReader
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage, build_chunks
from megatron_port.core.model.loss import StageLoss
from megatron_port.core.registry import LOSSES, OBJECTIVES

SideLayout = Literal["sample", "position"]
"""Layout of a side tensor: [batch, …], alike on the ranks that share a sample, or [batch, seq, …], divided between
context-parallel ranks as labels are."""


@dataclass(frozen=True)
class WholeSamples:
    """Samples of a micro-batch before they are divided between ranks."""

    ids: tuple[int, ...]
    """Global numbers of the samples."""
    labels: torch.Tensor
    """int64 [batch, seq]"""
    mask: torch.Tensor | None
    """float32 [batch, seq]: which labels count; None: all"""
    starts: torch.Tensor | None
    """int32 [batch, seq]: where the document of each position starts; None: a sample is one document"""
    rows: Sequence[Sample] = ()
    """Samples as the dataset has them; empty: they come from no dataset"""
    training: bool = False
    """Whether they are trained on, not evaluated"""
    divided: bool = False
    """Whether context-parallel ranks divide them, so that none has the tokens after its own"""


class Objective(StageLoss):
    """The mean of the token losses; see the module. An objective may hold what :meth:`side` reads; it holds nothing
    that changes from step to step.

    ``config``: the run's; None: the cross-entropy.
    """

    side_layout: Mapping[str, SideLayout] = MappingProxyType({})
    """Layout of each tensor that :meth:`side` may return."""
    documents_of_sample: int = 0
    """Documents that a sample of :meth:`datasets` has, which stay in one split; 0: samples are made as ``data.packing``
    and ``data.order`` say."""
    terms: int = 0
    """Number of counts that :meth:`term_counts` returns, for terms of the loss that are means of their own."""
    frozen_prefix = ""
    """Start of the names of a frozen model's parameters that :meth:`build` adds; empty: it adds none."""
    conflicts: tuple[Conflict | Rule, ...] = ()
    """Settings that contradict a plugin's objective. The package's own have tables that need no torch."""

    def __init__(self, config: RunConfig | None = None) -> None:
        loss = "cross_entropy" if config is None else config.training.loss
        self.token_loss = loss if loss in LOSSES.names else "cross_entropy"
        """Name of the head's token loss in ``registry.LOSSES``."""

    # -- data --------------------------------------------------------------------------------------------------------

    def check_corpora(self, corpora: Sequence[IndexedDataset]) -> None:
        """Check that corpora hold what the loss is of: here, no pairs of answers.

        Raises DataError.
        """
        for corpus in corpora:
            pairs = corpus.meta.pairs if corpus.meta is not None else 0
            if pairs:
                raise DataError(
                    f'{corpus.name} holds {pairs} pairs of a chosen and a rejected answer; training.loss = "dpo" '
                    "learns from them, any other loss would learn the rejected ones too"
                )

    def datasets(self, corpus: IndexedDataset) -> Callable[..., TokenDataset]:
        """Return what makes the dataset of a corpus' documents from ``first``, ``end``, ``seq_length`` and
        ``vocab_size``, where ``documents_of_sample`` is set.

        Raises DataError: what it reads beside the corpus is missing or damaged.
        """
        raise NotImplementedError(f"{type(self).__name__} sets documents_of_sample and has no method datasets")

    def fingerprint_of(self, corpus: IndexedDataset) -> dict[str, str]:
        """Return what the objective adds to the fingerprint of a corpus (``data.indexed``). Raises DataError."""
        return {}

    def open_side(self, samples: int, *, whole: bool) -> None:
        """Open what :meth:`side` reads for a run that consumes ``samples`` samples.

        ``whole``: check all of it; on other ranks the start is enough. Raises DataError.
        """

    def side(self, samples: WholeSamples) -> dict[str, torch.Tensor]:
        """Return the side tensors of a micro-batch, on the host, for the last stage; keys are of ``side_layout``.

        Raises DataError: what is stored does not fit the samples.
        """
        return {}

    def known_count(self, batch: MicroBatch, seq_length: int) -> float | None:
        """Return what a micro-batch of a replica adds to the step's count, where every stage can tell; None: only the
        last stage can, by :meth:`count`, and the stages wait for it. Alike on all ranks."""
        return None if batch.masked else float(len(batch.sample_ids) * seq_length)

    def count(self, batch: MicroBatch, positions: float) -> torch.Tensor | float:
        """Return what this rank's part of a micro-batch adds to the count that the step's mean divides by: here, labels
        that count. On the last stage. ``positions``: of a sample on this rank."""
        return len(batch.sample_ids) * positions if batch.loss_mask is None else batch.loss_mask.sum().double()

    def term_counts(self, batch: MicroBatch, *, divided: bool) -> torch.Tensor:
        """Return what this rank's part of a micro-batch adds to the counts of the loss' other terms [terms], which
        ``StepContext.term_counts`` has as sums over the step. On the last stage, in training.

        ``divided``: context-parallel ranks share the samples.
        """
        return torch.zeros(self.terms)

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float | None]:
        """Return what a step reports beside its loss, by names of metrics.jsonl (None: nothing to report).

        ``sums``: of the step, by the names of ``sums``; ``count``: what the step's mean divides by.
        """
        return {}

    # -- model -------------------------------------------------------------------------------------------------------

    def build(self, build: BuildContext, layers_by_chunk: Sequence[int]) -> list[GPTStage]:
        """Build this rank's chunks of the model, given the number of transformer layers of each virtual stage."""
        return build_chunks(build, layers_by_chunk)

    def is_frozen(self, name: str) -> bool:
        """Return whether a parameter is of the frozen model beside the run's, which checkpoints do not hold."""
        return bool(self.frozen_prefix) and name.startswith(self.frozen_prefix)

    def frozen_run(self) -> RunConfig:
        """Return the run of the frozen model alone on this run's layout, where ``frozen_prefix`` is set.

        Raises CheckpointError, ConfigError.
        """
        raise NotImplementedError(f"{type(self).__name__} sets frozen_prefix and has no method frozen_run")

    def add_frozen(self, read: StateReader) -> AbstractContextManager[StateReader]:
        """Return a context with a reader of the run's state that also has the frozen model's parameters."""
        return nullcontext(read)

    # -- run ---------------------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Check, without ranks, that what the objective reads beside the data is there. Raises PortError."""

    def identity(self) -> dict[str, Any]:
        """Return entries for a checkpoint's extra state that tell what the run learns from. Raises PortError."""
        return {}

    def check_resumed(self, extra: Mapping[str, Any], where: str) -> None:
        """Check that a run continues with what the checkpoint ``where``, of this extra state, learned from.

        Raises CheckpointError: it is something else.
        """

    def notes(self, read: StateReader, path: str) -> str:
        """Return lines, each after a line break, for a run that begins with the weights ``read`` of ``path``."""
        return ""


def objective_name(config: RunConfig) -> str:
    """Return the name of a run's objective in ``registry.OBJECTIVES``."""
    if config.distillation.enabled:
        return "distillation"
    if config.training.loss in OBJECTIVES.names:
        return config.training.loss
    return "multi_token" if config.model.mtp_layers else "next_token"


def objective_of(config: RunConfig) -> Objective:
    """Return the objective of a run. Raises ConfigError: a plugin registered something else."""
    name = objective_name(config)
    make: Callable[[RunConfig], Objective] = OBJECTIVES.function(name)
    found = make(config)
    if not isinstance(found, Objective):
        raise ConfigError(
            f"objective {name!r} is {type(found).__name__}, which is no Objective; derive it from "
            "megatron_port.core.data.objective.Objective (CONTRIBUTING.md)"
        )
    return found
