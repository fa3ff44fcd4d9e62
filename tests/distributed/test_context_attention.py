"""Attention of sequences that ranks divide, by every method, against plain attention of the whole sequence in fp64.

The oracle shares no code with the package: dense scores, and the twin's dropout.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from twin.streams import dropout_factors

from megatron_port.core.dist.positions import Positions, SequencePartition
from megatron_port.core.layers.attention import Attention, AttentionMask, ContextAttention, DropoutOf, math_attention
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.fused import ProbabilityDropout
from megatron_port.core.layers.step import earliest_start
from megatron_port.core.registry import PARTS
from megatron_port.ext.context.attention import ExchangeHeads, GatherKeys, RingKeys
from megatron_port.ext.context.division import ChunkDivision, divide
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose import PARTIALS
from megatron_port.ext.kernels.ops import attention as own
from megatron_port.ext.kernels.packed_documents import pack_documents
from megatron_port.ext.kernels.torch_attention import sdpa_attention

SEED, STEP, OP = 3, 5, "layers.0.attention.probs"
METHODS = ("gather", "heads", "ring")
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Draw:
    """One attention of one rank's heads, for ranks that divide its positions."""

    seed: int
    method: str
    provider: str
    dtype: torch.dtype
    division: ChunkDivision
    seq: int
    heads: int
    groups: int
    window: int
    softcap: float
    has_sinks: bool
    starts: torch.Tensor | None
    dropout: float

    @property
    def samples(self) -> list[int]:
        return [7, 1 << 40]

    def inputs(self) -> Tensors:
        """q, k, v and sinks: scores far from 0, sinks among them."""
        draw = torch.Generator().manual_seed(self.seed)
        shapes = [(self.seq, 2, n, 6) for n in (self.heads, self.groups, self.groups)]
        q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
        return 3.0 * q, k, v, torch.randn(self.heads, generator=draw, dtype=torch.float64)

    def weights(self) -> torch.Tensor:
        """What each element of the result counts in the loss."""
        draw = torch.Generator().manual_seed(-self.seed - 1)
        return torch.randn(self.seq, 2, self.heads * 6, generator=draw, dtype=torch.float64)


def divisions(r: random.Random, ranks: int) -> list[ChunkDivision]:
    """The two that are fixed, and one of several runs each."""
    chunks = list(range(4 * ranks))
    r.shuffle(chunks)
    drawn = tuple(tuple(sorted(chunks[4 * i : 4 * i + 4])) for i in range(ranks))
    return [divide(ranks, "contiguous"), divide(ranks, "zigzag"), ChunkDivision(4 * ranks, drawn)]


def draw_of(seed: int, ranks: int) -> Draw:
    """A pure function; method, division and documents come in turn."""
    r = random.Random(seed)
    method, division = METHODS[seed % 3], divisions(r, ranks)[seed // 3 % 3]
    provider = "math" if seed % 5 else r.choice(["own", "sdpa"] if method != "ring" else ["own"])
    plain = provider == "sdpa"
    dropout = 0.3 if r.random() < 0.4 and (provider == "math" or (provider == "own" and method != "ring")) else 0.0
    seq, groups = division.chunks * r.choice((1, 2, 3)) * (2 if division.chunks < 8 else 1), r.choice((1, 2, 4))
    heads = groups * r.choice((1, 2, 4))
    if method == "heads":
        groups = r.choice([n for n in (1, 2, 4, 8) if n % ranks == 0 or ranks % n == 0])
        heads = max(groups, ranks) * r.choice((1, 2))
    return Draw(
        seed, method, provider, torch.float32 if provider == "own" else torch.float64, division, seq, heads, groups,
        window=r.choice((0, 0, 1, 3, seq // 2)), softcap=0.0 if plain else r.choice((0.0, 1.5)),
        has_sinks=not plain and r.random() < 0.5, starts=documents(r, seq, seq // division.chunks), dropout=dropout,
    )


def documents(r: random.Random, seq: int, chunk: int) -> torch.Tensor | None:
    """Where documents start: none, drawn ones, many of one token, chunks that are documents."""
    kind = r.choice(("none", "drawn", "short", "edges"))
    if kind == "none":
        return None
    rows = []
    for sample in range(2):
        edges = {0, *r.sample(range(seq), {"drawn": 3, "short": seq * 2 // 3, "edges": 1}[kind])}
        edges |= set(range(0, seq, chunk)) if kind == "edges" and sample == 0 else set()
        rows.append([max(e for e in edges if e <= i) for i in range(seq)])
    return torch.tensor(rows, dtype=torch.int32)


def dense(draw: Draw, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The whole sequence by definition: [seq, batch, heads · d]."""
    shared = draw.heads // draw.groups
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(shared, 2)) / q.shape[-1] ** 0.5
    scores = draw.softcap * torch.tanh(scores / draw.softcap) if draw.softcap else scores
    i, j = torch.arange(draw.seq)[:, None], torch.arange(draw.seq)[None]
    hidden = (j > i) | ((j <= i - draw.window) if draw.window else (j < 0))
    if draw.starts is not None:
        hidden = hidden | (j < draw.starts[:, :, None])
    scores = scores.masked_fill(hidden.expand(2, draw.seq, draw.seq)[:, None], float("-inf"))
    if draw.has_sinks:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(2, -1, draw.seq, 1)), -1)
    probs = torch.softmax(scores, -1)[..., : draw.seq]
    if draw.dropout:  # this rank has the second half of the layer's heads
        shape = 2 * draw.heads, draw.seq, draw.seq
        probs = probs * dropout_factors(SEED, STEP, draw.samples, OP, shape, draw.dropout)[:, draw.heads :]
    return torch.einsum("bhqk,kbhd->qbhd", probs, v.repeat_interleave(shared, 2)).flatten(2)


def expected(draw: Draw) -> Tensors:
    """The result and the gradients of all inputs."""
    leaves = [x.requires_grad_() for x in draw.inputs()]
    out = dense(draw, *leaves)
    grads = torch.autograd.grad(out, leaves, draw.weights(), allow_unused=True, materialize_grads=True)
    return (out.detach(), *grads)


def provider_of(draw: Draw) -> Attention:
    kernels.load("cpu")
    return {"math": math_attention, "own": own.attention, "sdpa": sdpa_attention()}[draw.provider]


def method_of(draw: Draw, group: dist.ProcessGroup) -> ContextAttention:
    if draw.method == "ring":
        return RingKeys(group, PARTS.function(PARTIALS[draw.provider])())
    return (GatherKeys if draw.method == "gather" else ExchangeHeads)(group, provider_of(draw))


def attend(draw: Draw, method: ContextAttention, rank: int, inputs: Tensors, sinks: torch.Tensor) -> torch.Tensor:
    """The result of a rank's queries, given its rows."""
    stream = DropoutStream(SEED, torch.device("cpu"))
    stream.set_micro_batch(STEP, draw.samples)

    def dropout_of(
        queries: Positions, *, first_head: int = 0, keys: Positions | None = None, seq_length: int = 0
    ) -> ProbabilityDropout:
        return stream.probability_dropout(
            draw.dropout, op=OP, head_offset=draw.heads + first_head, positions=queries, keys=keys,
            seq_length=seq_length,
        )

    mask = AttentionMask(
        draw.window, draw.softcap, sinks if draw.has_sinks else None, draw.starts,
        documents=None if draw.starts is None else partial(pack_documents, draw.starts, draw.starts.device),
        earliest=None if draw.starts is None else partial(earliest_start, draw.starts),
    )
    q, k, v = inputs
    out = method.attend(
        q, k, v, SequencePartition(draw.division, rank), dropout_of=dropout_of if draw.dropout else None,
        mask=mask if draw.window or draw.softcap or draw.has_sinks or draw.starts is not None else None,
    )
    stream.set_micro_batch(STEP + 1, [9, 9])  # the backward pass runs when others are in flight
    return out


def on_ranks(draws: list[Draw]) -> list[list[float]]:
    """The largest deviation of the result and of each gradient, in parts of the largest element; on each rank. Groups
    are of every second rank where there are two, as with tensor parallelism."""
    ranks, world = draws[0].division.ranks, dist.get_world_size()
    groups = [dist.new_group(list(range(i, world, world // ranks))) for i in range(world // ranks)]
    group = groups[dist.get_rank() % len(groups)]
    rank = dist.get_rank(group)
    out = []
    for draw in draws:
        held = SequencePartition(draw.division, rank).held(draw.seq)
        leaves = [x.to(draw.dtype).requires_grad_() for x in (*map(held.take, draw.inputs()[:3]), draw.inputs()[3])]
        result = attend(draw, method_of(draw, group), rank, tuple(leaves[:3]), leaves[3])
        weights = held.take(draw.weights()).to(draw.dtype).mT.contiguous().mT  # as views may hand gradients on
        grads = torch.autograd.grad(result, leaves, weights, allow_unused=True, materialize_grads=True)
        dist.all_reduce(grads[3], group=group)
        want = expected(draw)
        want = (*map(held.take, want[:4]), want[4])
        pairs = zip((result, *grads), want, strict=True)
        out.append([float((a.detach() - b).abs().max()) / max(1.0, float(b.abs().max())) for a, b in pairs])
    return out


def bits_on_ranks(draws: list[Draw]) -> list[bool]:
    """Whether gathered keys give the bits that the same kernel gives for the whole sequence."""
    out, rank, group = [], dist.get_rank(), dist.group.WORLD
    assert group is not None
    for draw in draws:
        held = SequencePartition(draw.division, rank).held(draw.seq)
        q, k, v, sinks = (x.to(draw.dtype) for x in draw.inputs())
        mine = attend(draw, method_of(draw, group), rank, (*map(held.take, (q, k, v)),), sinks)
        whole = attend(draw, Alone(provider_of(draw)), 0, (q, k, v), sinks)
        out.append(torch.equal(mine, held.take(whole)))
    return out


class Alone:
    """One process with the whole sequence."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partition: SequencePartition, *,
        dropout_of: DropoutOf | None, mask: AttentionMask | None,
    ) -> torch.Tensor:
        dropout = None if dropout_of is None else dropout_of(Positions.contiguous(q.shape[0]))
        return self.attention(q, k, v, dropout=dropout, mask=mask)


def test_gathered_keys_give_the_bits_of_one_process(ranks: RankPool) -> None:
    """The own kernel in bf16: windows, documents, sinks, caps and dropout; runs that divide no tile evenly."""
    dropouts = (0.0, 0.3)
    draws = [
        replace(draw_of(seed, 4), method="gather", provider="own", dtype=torch.bfloat16, dropout=dropouts[seed % 2])
        for seed in range(18)
    ]
    assert all(map(all, ranks.run(4, bits_on_ranks, draws)))


def roundings_on_ranks(draws: list[Draw]) -> list[float]:
    """The share of a result's elements that are not the exact ones rounded once."""
    out, rank, group = [], dist.get_rank(), dist.group.WORLD
    assert group is not None
    for draw in draws:
        held = SequencePartition(draw.division, rank).held(draw.seq)
        rounded = [x.to(draw.dtype) for x in draw.inputs()]
        q, k, v, sinks = rounded
        mine = attend(draw, method_of(draw, group), rank, (*map(held.take, (q, k, v)),), sinks)
        want = held.take(dense(draw, *(x.double() for x in rounded))).to(draw.dtype)
        out.append(float((mine != want).double().mean()))
    return out


def test_the_parts_of_a_ring_are_not_rounded(ranks: RankPool) -> None:
    """Results in bf16 are those of fp64 rounded once, but for the few that lie between two numbers."""
    draws = [
        replace(draw_of(seed, 4), method="ring", provider=provider, dtype=torch.bfloat16, dropout=0.0)
        for seed in range(6) for provider in ("math", "own")
    ]
    worst = max(map(max, ranks.run(4, roundings_on_ranks, draws)))
    assert worst < 0.02, worst


def fused_draws(ranks: int, dtype: torch.dtype, count: int) -> list[Draw]:
    """Rings under the causal mask alone, sinks among them, in every division."""
    return [
        replace(draw_of(seed, ranks), method="ring", provider="sdpa", dtype=dtype, window=0, softcap=0.0, starts=None,
                dropout=0.0)
        for seed in range(count)
    ]


@pytest.mark.parametrize("ranks_of_a_sequence", [2, 4])
def test_fused_parts_are_attention_of_the_whole_sequence(ranks: RankPool, ranks_of_a_sequence: int) -> None:
    draws = fused_draws(ranks_of_a_sequence, torch.float64, 24)
    assert len({draw.division.chunks for draw in draws}) > 1 and any(draw.has_sinks for draw in draws)
    worst = max(max(map(max, results)) for results in ranks.run(4, on_ranks, draws))
    assert worst < 1e-12, worst


def _rows(held: Positions | None, x: torch.Tensor) -> torch.Tensor:
    return x if held is None else held.take(x)


def errors_on_ranks(draws: list[Draw]) -> list[tuple[float, float]]:
    """Errors of the result and the gradients (root mean square), in a ring and by the same kernel in one process."""
    out, rank, group = [], dist.get_rank(), dist.group.WORLD
    assert group is not None
    for draw in draws:
        held = SequencePartition(draw.division, rank).held(draw.seq)
        rounded = [x.to(draw.dtype) for x in draw.inputs()]
        q, k, v = (x.double().requires_grad_() for x in rounded[:3])
        result = dense(draw, q, k, v, rounded[3].double())
        want = [result, *torch.autograd.grad(result, (q, k, v), draw.weights().to(draw.dtype).double())]
        found = []
        for method, mine in ((method_of(draw, group), held), (Alone(provider_of(draw)), None)):
            take = partial(_rows, mine)
            leaves = [take(x).clone().requires_grad_() for x in rounded[:3]]
            mixed = attend(draw, method, rank, tuple(leaves), rounded[3])
            got = [mixed, *torch.autograd.grad(mixed, leaves, take(draw.weights()).to(draw.dtype))]
            squares = [(a.double() - take(b)).square().mean() / b.square().mean() for a, b in zip(got, want)]
            found.append(float(torch.stack(squares).mean().sqrt()))
        out.append((found[0], found[1]))
    return out


def test_fused_parts_round_little_more_than_one_process(ranks: RankPool) -> None:
    """In bf16 each part is rounded, then their sum: less than twice the error of one process."""
    draws = [replace(draw, has_sinks=False) for draw in fused_draws(4, torch.bfloat16, 12)]
    found = ranks.run(4, errors_on_ranks, draws)
    for of_draw in zip(*found, strict=True):
        ring, alone = (sum(e[i] ** 2 for e in of_draw) ** 0.5 for i in (0, 1))
        assert ring < 2 * alone, (ring, alone)


@pytest.mark.parametrize("ranks_of_a_sequence", [2, 4])
def test_every_method_is_attention_of_the_whole_sequence(ranks: RankPool, ranks_of_a_sequence: int) -> None:
    draws = [draw_of(seed, ranks_of_a_sequence) for seed in range(45)]
    found = ranks.run(4, on_ranks, draws)
    bad = [
        f"rank {rank}: {draw}: {deviations}"
        for rank, results in enumerate(found) for draw, deviations in zip(draws, results, strict=True)
        if max(deviations) > (1e-12 if draw.dtype == torch.float64 else 4e-6)
    ]
    assert not bad, f"{len(bad)} of {4 * len(draws)}:\n" + "\n".join(bad)
