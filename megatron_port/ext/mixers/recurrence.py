"""Linear recurrences over the positions of a sequence: one position after the other, and in chunks.

A head has a state S [key, value]. At each position it decays, learns what its key should give, and is read:

    S_t = a_t S_{t-1} + k_t u_tᵀ        o_t = S_tᵀ q_t

with u_t = v_t under the rule of decay alone (Mamba-2, arXiv 2405.21060), and u_t = b_t (v_t - a_t S_{t-1}ᵀ k_t) under
the delta rule (Gated DeltaNet, arXiv 2412.06464). a_t = exp(g_t) is a number of each head, or of each element of its
key (Kimi Delta Attention, arXiv 2510.26692). Where a document begins, a_t is 0: nothing of the state before it is left.

:func:`in_steps` is this definition. :func:`in_chunks` computes the same by products of matrices: within a chunk
positions see one another through a triangular matrix, and the state passes from chunk to chunk. What positions
do to a state that comes from before them is linear, S' = P S + L (:func:`passage`), so ranks that divide a sequence
exchange (P, L) and nothing else.

Everything is computed in fp32, or fp64 of fp64 operands. Tensors are [batch, heads, positions, ...].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 16
"""Positions of a chunk between which decays by element of a key are computed for each pair."""


@dataclass(frozen=True)
class Operands:
    """Operands of a recurrence at some neighbouring positions."""

    queries: torch.Tensor
    """[batch, heads, n, key]"""
    keys: torch.Tensor
    """[batch, heads, n, key]"""
    values: torch.Tensor
    """[batch, heads, n, value]"""
    decay: torch.Tensor
    """g [batch, heads, n], or by element of a key [batch, heads, n, key]; at most 0."""
    rate: torch.Tensor | None
    """b [batch, heads, n] of the delta rule; None: decay alone."""
    starts: torch.Tensor | None = None
    """bool [batch, n]: a document begins there; None: none does."""

    @property
    def decays(self) -> torch.Tensor:
        """g [batch, heads, n, 1 or key]"""
        return self.decay if self.decay.dim() == self.keys.dim() else self.decay[..., None]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that are there and have a gradient."""
        found = self.queries, self.keys, self.values, self.decay, self.rate
        return tuple(x for x in found if x is not None)


def zero_state(operands: Operands) -> torch.Tensor:
    """Return the state [batch, heads, key, value] before the first position."""
    k, v = operands.keys, operands.values
    return k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])


def in_steps(operands: Operands, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o [batch, heads, n, value], the state after the last position), by the definition."""
    q, k, v, rate, out = operands.queries, operands.keys, operands.values, operands.rate, []
    a = operands.decays.exp()
    if operands.starts is not None:
        a = a.masked_fill(operands.starts[:, None, :, None], 0.0)
    for t in range(q.shape[2]):
        state = state * a[:, :, t, :, None]
        learned = v[:, :, t]
        if rate is not None:
            learned = rate[:, :, t, None] * (learned - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t]))
        state = state + k[:, :, t, :, None] * learned[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(out, dim=2), state


class _Pairs:
    """The decay from one position of a chunk to a later one or itself, 0 elsewhere."""

    def __init__(self, sums: torch.Tensor, hidden: torch.Tensor, dtype: torch.dtype) -> None:
        self.sums, self.hidden, self.dtype = sums, hidden, dtype
        self.by_head = self._between(sums, sums, hidden)[..., 0] if sums.shape[-1] == 1 else None

    def _between(self, later: torch.Tensor, sums: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[C, C, 1 or key]: differences that do not count are masked before exp, which would overflow."""
        apart = (later[..., :, None, :] - sums[..., None, :, :]).to(self.dtype)
        return apart.masked_fill(hidden[..., None], float("-inf")).exp()

    def scores(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the decayed products [C, C] of x [C, key] with ``keys`` [C, key]."""
        if self.by_head is not None:
            return (x @ keys.mT) * self.by_head
        size, rows = x.shape[-2], []
        for a in range(0, size, BLOCK):
            b = min(a + BLOCK, size)
            # From a position before the block to its first, and on from there: neither factor is above 1.
            later = x[..., a:b, :] * (self.sums[..., a:b, :] - self.sums[..., a : a + 1, :]).to(self.dtype).exp()
            before = keys[..., :a, :] * (self.sums[..., a : a + 1, :] - self.sums[..., :a, :]).to(self.dtype).exp()
            within = self._between(self.sums[..., a:b, :], self.sums[..., a:b, :], self.hidden[..., a:b, a:b])
            own = torch.einsum("...ik,...jk,...ijk->...ij", x[..., a:b, :], keys[..., a:b, :], within)
            rows.append(F.pad(torch.cat((later @ before.mT, own), dim=-1), (0, size - b)))
        return torch.cat(rows, dim=-2).masked_fill(self.hidden, 0.0)


@dataclass(frozen=True)
class _Chunks:
    """Relations of the positions of a chunk to one another, and to the state that comes into it: [batch, heads,
    chunks, ...]."""

    keys: torch.Tensor
    """[C, key]"""
    learned: torch.Tensor
    """[C, value]: u without what the state that comes in takes away."""
    read: torch.Tensor | None
    """[C, key]: what that state takes away is read S; None: nothing."""
    pairs: _Pairs
    before: torch.Tensor
    """[C, 1 or key]: the decay of the state that comes in, at each position."""
    to_end: torch.Tensor
    """[C, 1 or key]: the decay from each position to the chunk's end."""
    total: torch.Tensor
    """[1 or key, 1]: the decay of the state that comes in, at the end."""

    def states(self, state: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (the state that comes in, u [C, value], the state behind it) of each chunk, from the first one's."""
        written, reads = (self.keys * self.to_end).mT, self.read
        # Taken apart at once: the gradient of a slice would be copied into zeros for each chunk.
        columns = [x.unbind(2) for x in (self.learned, written, self.total)]
        read = [None] * len(columns[0]) if reads is None else reads.unbind(2)
        for learned, write, total, take in zip(*columns, read, strict=True):
            before = state
            if take is not None:
                learned = learned - take @ before
            state = before * total + write @ learned
            yield before, learned, state


def _decays(
    g: torch.Tensor, starts: torch.Tensor | None
) -> tuple[_Pairs, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``pairs``, ``before``, ``to_end`` and ``total`` of :class:`_Chunks` from g [C, 1 or key].

    Sums are in fp64: behind strong decay the difference of two in fp32 has few digits left.
    """
    sums, wide = g.double().cumsum(-2), g.dtype
    hidden = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool, device=g.device).triu(1)
    until_end, before = (sums[..., -1:, :] - sums).to(wide), sums.to(wide).exp()
    if starts is not None:
        document = starts.cumsum(-1)  # within the chunk; 0: the one that comes in
        hidden = hidden | (document[..., :, None] != document[..., None, :])
        before = before.masked_fill((document != 0)[..., None], 0.0)
        until_end = until_end.masked_fill((document != document[..., -1:])[..., None], float("-inf"))
    return _Pairs(sums, hidden, wide), before, until_end.exp(), before[..., -1, :, None]


def _cut(x: torch.Tensor, dim: int, chunk: int) -> torch.Tensor:
    """Cut a dimension into chunks, filled up with zeros: keys, rates and decays of 0 leave a state as it is."""
    left = -x.shape[dim] % chunk
    if left:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, left))
    cut: torch.Tensor = x.unflatten(dim, (-1, chunk))
    return cut


def _chunks(operands: Operands, chunk: int, further: int = 0) -> _Chunks:
    """Return the operands' chunks; ``further``: columns of zeros behind the values."""
    k, v = _cut(operands.keys, 2, chunk), _cut(F.pad(operands.values, (0, further)), 2, chunk)
    starts = None if operands.starts is None else _cut(operands.starts, 1, chunk)[:, None]
    pairs, before, to_end, total = _decays(_cut(operands.decays, 2, chunk), starts)
    if operands.rate is None:
        return _Chunks(k, v, None, pairs, before, to_end, total)
    rate = _cut(operands.rate, 2, chunk)[..., None]
    system = pairs.scores(k, k) * rate
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v, k * before), dim=-1) * rate, upper=False, unitriangular=True
    )
    learned, read = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    return _Chunks(k, learned, read, pairs, before, to_end, total)


def in_chunks(
    operands: Operands, state: torch.Tensor, *, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`in_steps` does, up to rounding. ``chunk``: positions whose pairs are computed at once."""
    chunks, q, out = _chunks(operands, chunk), _cut(operands.queries, 2, chunk), []
    seen, q = chunks.pairs.scores(q, chunks.keys), q * chunks.before
    for one, pairs, (before, learned, after) in zip(q.unbind(2), seen.unbind(2), chunks.states(state), strict=True):
        out.append(one @ before + pairs @ learned)
        state = after
    return torch.cat(out, dim=2)[:, :, : operands.queries.shape[2]], state


def passage(operands: Operands, before: torch.Tensor | None, *, chunk: int) -> torch.Tensor:
    """Return (L, P) side by side, [batch, heads, key, value + P's]: a state S that comes in leaves as P S + L.

    P is [key, key] under the delta rule, and under decay alone [key, 1], one number for each element of a key.
    ``before``: the passage of the positions before these; None: there are none.
    """
    k, values, delta = operands.keys, operands.values.shape[-1], operands.rate is not None
    size = k.shape[-1]
    if before is None:
        one = torch.eye(size, dtype=k.dtype, device=k.device) if delta else k.new_ones(size, 1)
        before = torch.cat((zero_state(operands), one.expand(*k.shape[:2], *one.shape)), dim=-1)
    chunks = _chunks(operands, chunk, size if delta else 0)
    state, product = before.split((values, before.shape[-1] - values), dim=-1)
    if delta:
        state = before
    for total, (_, _, after) in zip(chunks.total.unbind(2), chunks.states(state), strict=True):
        state = after
        product = product if delta else product * total  # not prod, whose gradient asks the device for zeros
    return state if delta else torch.cat((state, product), dim=-1)


def passed(passages: Sequence[torch.Tensor], values: int) -> list[torch.Tensor]:
    """Return the states before each of ``passages``, which follow one another from the beginning of the sequence, and
    behind the last; ``values``: elements of a value."""
    out = [torch.zeros_like(passages[0][..., :values])]
    for one in passages:
        local, product = one.split((values, one.shape[-1] - values), dim=-1)
        before = out[-1]
        out.append((product * before if product.shape[-1] == 1 else product @ before) + local)
    return out


def convolve(
    x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal convolution of each channel: y_t = sum over j of weight[:, -1 - j] x_{t-j}.

    x [n, batch, channels]; ``before`` [kernel - 1, batch, channels]: the rows ahead of x; weight [channels, kernel].
    ``reach`` int [n, batch]: positions of the same document before each; None: any number. The order of the sum is
    fixed, so channels may be divided without a change of bits.
    """
    kernel, n = weight.shape[1], x.shape[0]
    rows, out = torch.cat((before, x)), None
    for j in range(kernel):
        term = rows[kernel - 1 - j : kernel - 1 - j + n] * weight[:, kernel - 1 - j]
        if reach is not None and j:
            term = term.masked_fill((reach < j)[..., None], 0.0)
        out = term if out is None else out + term
    assert out is not None
    return out if bias is None else out + bias
