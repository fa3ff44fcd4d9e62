"""Log-probabilities of given texts, with a model split in any way; logits are never gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_port.core.errors import DataError
from megatron_port.tools.inference.model import InferenceModel


@dataclass(frozen=True)
class Score:
    """Scores of one sequence's scored tokens."""

    log_probability: float
    """Natural logarithm, summed over the tokens."""
    greedy: bool
    """Each of them was the likeliest."""


def score(
    model: InferenceModel, sequences: Sequence[tuple[Sequence[int], int]], *, batch_size: int = 8
) -> list[Score]:
    """Score the last ``count`` tokens of each ``(tokens, count)``, each given all before it. Collective.

    The same on every rank; replicas take the sequences in turn, longest first so that a batch has like lengths.

    Raises:
        DataError: a sequence is longer than the model's context and one more, or nothing stands before what is scored.
    """
    ctx, limit = model.ctx, model.model.seq_length
    for tokens, count in sequences:
        if not 1 <= count < len(tokens) or len(tokens) - 1 > limit:
            raise DataError(
                f"{len(tokens)} tokens, the last {count} to be scored: at least one must stand before them, and at "
                f"most model.seq_length + 1 = {limit + 1} are allowed"
            )
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i][0]))
    mine = order[ctx.index("dp") :: ctx.size("dp")]
    table = torch.zeros(len(sequences), 2, dtype=torch.float64, device=ctx.device)
    for number in range(model.batches(len(order), batch_size)):
        chosen = mine[number * batch_size : (number + 1) * batch_size]
        rows = model.from_last_stage(_score_batch(model, [sequences[i] for i in chosen or order[-1:]]))
        if chosen:
            table[torch.tensor(chosen, device=ctx.device)] = rows
    return [Score(p, bool(g)) for p, g in model.over_replicas(table).tolist()]


@torch.no_grad()
def _score_batch(model: InferenceModel, batch: list[tuple[Sequence[int], int]]) -> torch.Tensor:
    """Return float64 [batch, 2] on the last stage, zeros elsewhere: log-probability, 1 if greedy."""
    device = model.ctx.device
    longest = model.padded(max(len(t) for t, _ in batch) - 1)
    tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels, mask = torch.zeros_like(tokens), torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (sequence, count) in enumerate(batch):
        n = len(sequence) - 1
        whole = torch.tensor(list(sequence))
        tokens[i, :n], labels[i, :n] = whole[:-1], whole[1:]
        mask[i, n - count : n] = True
    logits = model.logits(tokens)
    out = torch.zeros(len(batch), 2, dtype=torch.float64, device=device)
    if logits is None:
        return out
    held = model.held(longest)
    log_p, greedy = _token_scores(model, logits, held.take(labels, dim=1).t().contiguous().to(device))
    counted = held.take(mask, dim=1).t().to(device)
    out[:, 0] = (log_p.double() * counted).sum(0)
    out[:, 1] = (~greedy & counted).sum(0)
    model.over_context(out)
    out[:, 1] = out[:, 1] == 0
    return out


def _token_scores(
    model: InferenceModel, logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probability, whether it is the likeliest) of each label; logits [seq, batch, columns]."""
    offset, extent = model.vocabulary
    assert model.stage.head is not None  # there are logits
    ops, group = model.stage.head.cross_entropy, model.ctx.over("tp")
    highest, total, target = ops.statistics(logits.contiguous(), labels, offset=offset, extent=extent)
    if group is not None:
        own = highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack((total * (own - highest).exp(), target))
        dist.all_reduce(sums, group=group)
        total, target = sums.unbind()
    return target - highest - total.log(), target >= highest
