"""The most likely tokens of logits over a split vocabulary, without gathering them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_port.core.dist.collectives import Group
from megatron_port.ext.objectives.stored_teacher import Stored

_CHUNK = 1 << 22
"""Logits sorted at a time."""


def vocab_parallel_top(
    logits: torch.Tensor, k: int, temperature: float, *, offset: int, extent: int, group: Group
) -> Stored:
    """Return the ``k`` most likely tokens of softmax(logits / temperature) and the mass of the others.

    ``logits`` [..., padded_vocab/tp], of which this rank's columns are the ids [offset, offset + extent). Each rank
    sends its own k candidates. Of equal logits the smaller id is taken, on any layout. Float32 (float64 for float64
    logits); the same on all ranks of the group.
    """
    shape, wide = logits.shape[:-1], torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(1, _CHUNK // rows.shape[1])
    parts = [_top(rows[i : i + step, :extent].to(wide) / temperature, k, offset, group)
             for i in range(0, rows.shape[0], step)]
    ids, values, tail = (torch.cat(found) for found in zip(*parts))
    return Stored(ids.view(*shape, k), values.view(*shape, k), tail.view(shape))


def _top(
    x: torch.Tensor, k: int, offset: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [rows, k], log-probabilities [rows, k], that of the rest [rows]) of logits [rows, columns]."""
    values, columns = x.sort(dim=-1, descending=True, stable=True)
    short = max(k - x.shape[1], 0)
    values = torch.nn.functional.pad(values[:, :k], (0, short), value=float("-inf"))
    ids = torch.nn.functional.pad(columns[:, :k] + offset, (0, short), value=-1)
    if group is not None:
        values, ids = _gathered(values, group), _gathered(ids, group)
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # ranks in the order of their ids
        values, ids = values.gather(-1, order), ids.gather(-1, order)
    e = (x - values[:, :1]).exp_()
    local = ids - offset
    here = (local >= 0) & (local < x.shape[1])
    rest = torch.nn.functional.pad(e, (0, 1)).scatter(1, local.masked_fill(~here, x.shape[1]), 0.0).sum(dim=-1)
    if group is not None:
        dist.all_reduce(rest, group=group)
    kept = values - values[:, :1]
    log_z = (kept.exp().sum(dim=-1) + rest).log()
    return ids, kept - log_z[:, None], rest.log() - log_z


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
