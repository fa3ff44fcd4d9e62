"""Direct preference optimization (Rafailov et al., arXiv 2305.18290): the loss of pairs of answers.

A sample holds the chosen conversation and, as its next document, the rejected one. The reward of an answer is beta
times its log-probability less that by the frozen reference; a pair's loss is -log sigmoid(reward of the chosen - reward
of the rejected). The sums over tokens are made in float64: what is left of them is a small difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.dataset import TokenDataset
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.data.objective import Objective, WholeSamples
from megatron_port.core.dist.record import StateReader
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.shapes import fingerprint
from megatron_port.core.registry import PARTS
from megatron_port.ext.objectives.pairs import check_pairs, read_header, read_reference

REWARDS = ("chosen_reward", "reward_margin", "reward_accuracy")
"""Names of the sums of a step over its pairs, and of their means in metrics.jsonl."""
REFERENCE = "reference"
"""Side tensor, float64 [batch, 2]: the reference's log-probability of the chosen and the rejected answer."""


class AnswerPairs(Objective):
    """A mean over pairs of answers; what contradicts it is in ``objectives.settings.LOSSES``."""

    documents_of_sample = 2

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.run = config

    def check_corpora(self, corpora: Sequence[IndexedDataset]) -> None:
        """Check that corpora hold pairs. Raises DataError."""
        check_pairs(corpora, self.run.training.loss)

    def datasets(self, corpus: IndexedDataset) -> Callable[..., TokenDataset]:
        """Return what makes the datasets of pairs of a corpus."""
        return partial(PARTS.function("preference pairs"), corpus, np.zeros(corpus.num_documents))

    def count(self, batch: MicroBatch, positions: float) -> torch.Tensor | float:
        """Return the number of pairs."""
        return super().count(batch, positions) if batch.loss_mask is None else batch.loss_mask.any(dim=1).sum().double()


class PairObjective(AnswerPairs):
    """The loss of pairs beside a frozen reference."""

    sums = REWARDS
    side_layout = MappingProxyType({REFERENCE: "sample"})

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.beta = config.training.dpo_beta

    def datasets(self, corpus: IndexedDataset) -> Callable[..., TokenDataset]:
        """Return what makes the datasets of pairs of a corpus, with the reference that lies beside it."""
        return partial(PARTS.function("preference pairs"), corpus, read_reference(corpus).sums)

    def fingerprint_of(self, corpus: IndexedDataset) -> dict[str, str]:
        """Return the hash of the reference, where there is one."""
        reference = read_header(corpus.prefix) if corpus.meta is not None and corpus.meta.pairs else None
        return {"reference": reference.xxh3} if reference else {}

    def side(self, samples: WholeSamples) -> dict[str, torch.Tensor]:
        """Return the references, zeros for samples that fill up a batch."""
        found = [row.side.get(REFERENCE, np.zeros(2)) for row in samples.rows]
        return {REFERENCE: torch.from_numpy(np.stack(found))} if found else {}

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return :func:`pair_loss_sum` of the token losses, in evaluations too."""
        assert stage.head is not None
        losses = stage.head.token_losses(logits, labels, z_loss=stage.head.z_loss)
        return pair_loss_sum(losses, mask, context, self.beta)

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float | None]:
        """Return the means over a step's pairs."""
        return {name: sums[name] / count for name in REWARDS} if count else {}

    def notes(self, read: StateReader, path: str) -> str:
        """Return a line for each corpus whose reference is not the model ``path`` with which training begins, or was
        computed in another precision than training is."""
        mine, lines, dtype = fingerprint(self.run.model, read), "", self.run.precision.dtype
        for prefix in self.run.data.train:
            header = read_header(prefix)
            if header is not None and header.fingerprint != mine:
                lines += f"\nnote: the reference of {prefix} is {header.weights}, and training begins with {path}"
            elif header is not None and header.dtype != dtype:
                lines += (f"\nnote: the reference of {prefix} was computed in {header.dtype}, and training is in "
                          f"{dtype}: rounding alone makes a margin; evaluate --reference with "
                          f"--set precision.dtype={dtype}")
        return lines


def pair_loss_sum(
    losses: torch.Tensor, mask: torch.Tensor | None, context: StepContext | None, beta: float
) -> torch.Tensor:
    """Return the sum of the losses of a micro-batch's pairs, a float64 scalar, and add to the sums of :data:`REWARDS`.

    Args:
        losses: of each token [batch, seq], minus the log-probability of its label.
        mask: 1 where a label is of an answer; a sample without any is no pair.
        context: says where the rejected conversation starts, and what the reference gives.

    Raises:
        ValueError: the samples are no pairs.
    """
    starts, reference = (None, None) if context is None else (context.document_starts, context.side.get(REFERENCE))
    if mask is None or context is None or starts is None or reference is None:
        raise ValueError("a loss of pairs needs micro-batches with loss_mask, document_starts and reference")
    found = -losses.double() * mask
    chosen, rejected = ((found * part).sum(dim=1) for part in (starts == 0, starts > 0))
    chosen, rejected = beta * (chosen - reference[:, 0]), beta * (rejected - reference[:, 1])
    margin, pair = chosen - rejected, mask.any(dim=1).double()
    for name, value in zip(REWARDS, (chosen, margin, (margin > 0).double())):
        context.add_auxiliary(name, (value.detach() * pair).sum())
    return (F.softplus(-margin) * pair).sum()
