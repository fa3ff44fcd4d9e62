"""The loss of a token that a teacher also judges, over a split vocabulary; no logits are ever gathered.

With logits s of the model and t of the teacher, p = softmax(t/T) and q = softmax(s/T), it is
α CE(s, label) + (1 - α) T² KL, where KL is KL(p‖q) (forward) or KL(q‖p) (reverse). Per token two reductions over the
ranks that share the vocabulary suffice: the maxima of s and t, then all sums at once, the one inside KL among them:
with a = s - max s and b = t - max t, KL(p‖q) = Σ e^(b/T) (b - a)/T / Σ e^(b/T) - log Σ e^(b/T) + log Σ e^(a/T).

The gradients are analytic and need no reduction of their own: T (q - p) for the forward divergence,
T q (log q - log p - KL) for the reverse one, times 1 - α, beside α (softmax(s) - onehot). As in
``layers.cross_entropy`` statistics are float32 (float64 for float64 logits), padded columns take no part, and the
gradient is written over the model's logits.

A stored teacher gives its k most likely tokens and the mass of all others (``Stored``). Then the outcomes of KL are
k + 1: these tokens, and "any other one", with probabilities p_r and q_r = Σ q over the other columns. That is the KL
of the coarser distributions, never above the whole one and equal to it where k is the vocabulary. Within the tail the
model is free: its gradient there keeps the proportions of q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.dist.collectives import Group
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.ext.objectives.stored_teacher import Stored

_CHUNK = 1 << 22
"""Logits taken at a time, in place of wide copies of all."""
_SPENT = "distillation: a second backward pass through logits over which the first one has written their gradient"


@dataclass(frozen=True)
class Objective:
    """Parts of the loss per token: ``alpha`` CE + (1 - ``alpha``) ``temperature``² KL, forward or ``reverse``."""

    alpha: float
    temperature: float
    reverse: bool = False


class _Dense:
    """KL from the teacher's logits [rows, v], of which this rank has the model's columns."""

    sums = 2

    def __init__(self, logits: torch.Tensor, objective: Objective) -> None:
        self.logits, self.objective = logits, objective

    def maximum(self, part: slice, extent: int, wide: torch.dtype) -> torch.Tensor | None:
        return self.logits[part, :extent].amax(dim=-1).to(wide)

    def _shifted(self, a: torch.Tensor, part: slice, maximum: torch.Tensor) -> torch.Tensor:
        return (self.logits[part, : a.shape[1]].to(a.dtype) - maximum[part, None]).div_(self.objective.temperature)

    def local(
        self, a: torch.Tensor, e: torch.Tensor, part: slice, maximum: torch.Tensor, offset: int
    ) -> list[torch.Tensor]:
        """Return this rank's Σ e^b and the sum within KL; a, b: shifted logits over T, e = e^a."""
        b = self._shifted(a, part, maximum)
        f = b.exp()
        return [f.sum(dim=-1), (e * (a - b) if self.objective.reverse else f * (b - a)).sum(dim=-1)]

    def divergence(self, z: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return KL [rows], from the model's Σ e^a and the sums over all ranks."""
        total, within = sums.unbind()
        between = z.log() - total.log()
        found: torch.Tensor = within / z - between if self.objective.reverse else within / total + between
        return found

    def gradient(
        self, a: torch.Tensor, q: torch.Tensor, part: slice, maximum: torch.Tensor, z: torch.Tensor,
        sums: torch.Tensor, divergence: torch.Tensor, offset: int,
    ) -> torch.Tensor:
        """Return T dKL/ds [rows, columns]."""
        b, total = self._shifted(a, part, maximum), sums[0]
        if not self.objective.reverse:
            return q - b.exp_().div_(total[:, None])
        shift = (total.log() - z.log() - divergence)[:, None]  # log q - log p - KL, without its a - b
        return q * (a - b).add_(shift)


class _Sparse:
    """KL from the tokens that a file keeps, and one outcome for all others."""

    sums = 3

    def __init__(self, stored: Stored, objective: Objective, wide: torch.dtype) -> None:
        k = stored.ids.shape[-1]
        self.ids, self.objective = stored.ids.reshape(-1, k), objective
        self.log_p = stored.log_probabilities.reshape(-1, k).to(wide)
        self.log_tail = stored.log_tail.reshape(-1).to(wide)

    def maximum(self, part: slice, extent: int, wide: torch.dtype) -> torch.Tensor | None:
        return None

    def _columns(self, part: slice, offset: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each kept token [rows, k], one beyond the last where it is another rank's; whether it is here)."""
        at = self.ids[part] - offset
        here = (at >= 0) & (at < columns)
        return at.masked_fill(~here, columns), here

    def local(
        self, a: torch.Tensor, e: torch.Tensor, part: slice, maximum: torch.Tensor, offset: int
    ) -> list[torch.Tensor]:
        """Return this rank's Σ e^a over the tail, Σ e^a over the kept tokens, and the sum within KL over these."""
        at, here = self._columns(part, offset, a.shape[1])
        a_kept, log_p = _padded(a).gather(1, at), self.log_p[part]
        e_kept = torch.where(here, a_kept.exp(), 0.0)
        tail = _padded(e).scatter(1, at, 0.0).sum(dim=-1)
        inner = e_kept * (a_kept - log_p) if self.objective.reverse else -log_p.exp() * a_kept
        return [tail, e_kept.sum(dim=-1), torch.where(here, inner, 0.0).sum(dim=-1)]

    def divergence(self, z: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return KL [rows] over the k + 1 outcomes."""
        tail, kept, within = sums.unbind()
        log_z = z.log()
        out: torch.Tensor
        log_q_tail = _log(tail) - log_z
        if self.objective.reverse:
            out = within / z - kept / z * log_z
            out += torch.where(tail > 0, tail / z * (log_q_tail - self.log_tail), 0.0)
            return out
        p, p_tail = self.log_p.exp(), self.log_tail.exp()
        out = within + (p * self.log_p).sum(dim=-1) + p.sum(dim=-1) * log_z
        out += torch.where(p_tail > 0, p_tail * (self.log_tail - log_q_tail), 0.0)
        return out

    def gradient(
        self, a: torch.Tensor, q: torch.Tensor, part: slice, maximum: torch.Tensor, z: torch.Tensor,
        sums: torch.Tensor, divergence: torch.Tensor, offset: int,
    ) -> torch.Tensor:
        """Return T dKL/ds [rows, columns]."""
        at, here = self._columns(part, offset, a.shape[1])
        log_p, log_tail, tail, log_z = self.log_p[part], self.log_tail[part], sums[0], z.log()
        at_kept = _padded(a).gather(1, at)
        q_kept = (at_kept - log_z[:, None]).exp()
        if self.objective.reverse:
            of_tail = _log(tail) - log_z - log_tail - divergence
            kept = q_kept * (at_kept - log_z[:, None] - log_p - divergence[:, None])
        else:
            of_tail = 1.0 - (log_tail + log_z - _log(tail)).exp()
            kept = q_kept - log_p.exp()
        of_tail = torch.where(tail > 0, of_tail, 0.0)
        return _padded(q * of_tail[:, None]).scatter(1, at, torch.where(here, kept, 0.0))[:, :-1]


def _log(x: torch.Tensor) -> torch.Tensor:
    """log x, finite where a sum has underflowed to 0."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()


def _padded(x: torch.Tensor) -> torch.Tensor:
    """[rows, columns + 1]: with a column of zeros, which stands for the tokens of other ranks."""
    return torch.nn.functional.pad(x, (0, 1))


class _VocabParallelDistillation(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | Stored, objective: Objective,
        offset: int, extent: int, group: Group,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows, flat = logits.view(-1, logits.shape[-1]), labels.reshape(-1)
        target: _Dense | _Sparse = _Sparse(teacher, objective, wide) if isinstance(teacher, Stored) else _Dense(
            teacher.reshape(-1, teacher.shape[-1]), objective)
        count, t = rows.shape[0], objective.temperature
        maxima = torch.full((2, count), float("-inf"), dtype=wide, device=logits.device)
        for part in _parts(rows) if extent else ():
            maxima[0, part] = rows[part, :extent].amax(dim=-1).to(wide)
            other = target.maximum(part, extent, wide)
            maxima[1, part] = maxima[0, part] if other is None else other
        if group is not None:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        sums = torch.zeros((3 + target.sums, count), dtype=wide, device=logits.device)
        for part in _parts(rows) if extent else ():
            shifted = rows[part, :extent].to(wide) - maxima[0, part, None]
            index, outside = _label_columns(flat[part], offset, extent)
            sums[0, part] = shifted.exp().sum(dim=-1)
            sums[1, part] = shifted.gather(-1, index).squeeze(-1).masked_fill_(outside, 0.0)
            a = shifted.div_(t)
            e = a.exp()
            sums[2, part] = e.sum(dim=-1)
            sums[3:, part] = torch.stack(target.local(a, e, part, maxima[1], offset))
        if group is not None:
            dist.all_reduce(sums, group=group)
        entropy, divergence = sums[0].log() - sums[1], target.divergence(sums[2], sums[3:])
        ctx.save_for_backward(logits, labels, maxima, sums, divergence)
        ctx.target, ctx.offset, ctx.extent, ctx.spent = target, offset, extent, False
        loss = objective.alpha * entropy + (1.0 - objective.alpha) * t * t * divergence
        ctx.mark_non_differentiable(entropy, divergence)
        ctx.set_materialize_grads(False)
        return loss.view(labels.shape), entropy.view(labels.shape), divergence.view(labels.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor, *unused: torch.Tensor | None) -> tuple[Any, ...]:
        if ctx.spent:
            raise RuntimeError(_SPENT)
        ctx.spent = True
        logits, labels, maxima, sums, divergence = ctx.saved_tensors
        target, extent, objective = ctx.target, ctx.extent, ctx.target.objective
        out = logits.detach()
        rows, flat, given = out.view(-1, out.shape[-1]), labels.reshape(-1), grad.reshape(-1).to(maxima.dtype)
        rows[:, extent:] = 0.0
        for part in _parts(rows) if extent else ():
            shifted = rows[part, :extent].to(maxima.dtype) - maxima[0, part, None]
            whole = shifted.exp().div_(sums[0, part, None])
            index, outside = _label_columns(flat[part], ctx.offset, extent)
            whole.scatter_add_(-1, index, outside.to(whole.dtype).sub_(1.0).unsqueeze(-1)).mul_(objective.alpha)
            a = shifted.div_(objective.temperature)
            q = a.exp().div_(sums[2, part, None])
            of_kl = target.gradient(
                a, q, part, maxima[1], sums[2, part], sums[3:, part], divergence[part], ctx.offset
            )
            whole.add_(of_kl, alpha=(1.0 - objective.alpha) * objective.temperature)
            rows[part, :extent] = whole.mul_(given[part, None]).to(rows.dtype)
        # As in layers.cross_entropy: a second loss of the same logits is to see the change.
        torch.autograd.graph.increment_version(out)
        return out, None, None, None, None, None, None


def _parts(rows: torch.Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)


def _label_columns(labels: torch.Tensor, offset: int, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each label [rows, 1], 0 where it is none of this rank's; whether that is so [rows])."""
    local = labels - offset
    outside = (local < 0) | (local >= extent)
    return local.masked_fill(outside, 0).unsqueeze(-1), outside


def vocab_parallel_distillation(
    logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | Stored, objective: Objective, *, offset: int,
    extent: int, group: Group,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, cross-entropy, KL) of each token [seq, batch] in nats; the loss alone has a gradient.

    A backward pass overwrites ``logits`` [seq, batch, padded_vocab/tp]. ``teacher``: its logits, split in the same way
    and left as they are, or what a file keeps of them. ``labels`` int64 [seq, batch] (global ids); this rank's columns
    are the ids [offset, offset + extent). KL is without the factor T². A label that is no rank's id has a meaningless
    loss, which is to be masked. Float32 (float64 for float64 logits).

    Raises RuntimeError in a second backward pass through the same logits.
    """
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _VocabParallelDistillation.apply(
        logits.contiguous(), labels.contiguous(), teacher, objective, offset, extent, group
    )
    return out
