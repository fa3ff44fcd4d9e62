"""Which of another rank's keys queries see, in rows, against the definition by positions."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import torch

from megatron_port.core.dist.positions import Positions, Run, SequencePartition
from megatron_port.core.layers.attention import AttentionMask
from megatron_port.core.layers.step import earliest_start
from megatron_port.ext.context.attention import blocks_by_runs, key_blocks, key_ranges
from megatron_port.ext.context.division import ChunkDivision, divide


def drawn(r: random.Random, seq: int) -> Positions:
    """Some runs of a sequence, in ascending order."""
    edges = sorted(r.sample(range(seq + 1), 2 * r.randint(1, 3)))
    return Positions(tuple(Run(a, b - a) for a, b in zip(edges[::2], edges[1::2])))


def test_blocks_hold_all_that_is_seen_and_ranges_say_what() -> None:
    """400 draws: what a query sees is in the block of its run, cut or not, nothing else is seen in it, and where nobody
    sees a key there is no block."""
    blocks_of_nothing = 0
    for seed in range(400):
        r = random.Random(seed)
        seq = r.randint(8, 24)
        queries, keys, window = drawn(r, seq), drawn(r, seq), r.choice((0, 1, 3))
        longest = seed % 4
        starts = None
        if seed % 2:
            edges = [{0, *r.sample(range(seq), 3)} for _ in range(2)]
            starts = torch.tensor([[max(e for e in some if e <= i) for i in range(seq)] for some in edges])
            starts = starts.to(torch.int32)
        blocks = key_blocks(
            queries, keys, window=window, earliest=None if starts is None else partial(earliest_start, starts),
            longest=longest,
        )
        assert all(count <= (longest or seq) for _, count, *_ in blocks)
        q, k = (x.index(torch.device("cpu")) for x in (queries, keys))
        seen = (k <= q[:, None]).expand(2, -1, -1).clone()
        seen &= (k > q[:, None] - window) if window else True
        seen &= k >= starts[:, q, None] if starts is not None else True
        found = torch.zeros_like(seen)
        for first_query, count, first_key, width in blocks:
            rows, columns = queries.rows(first_query, count), keys.rows(first_key, width)
            first, end = key_ranges(rows, columns, 2, torch.device("cpu"), window=window, starts=starts)
            visible = AttentionMask(first=first, end=end).visible(count, width, torch.device("cpu"))
            found[:, first_query : first_query + count, first_key : first_key + width] = visible[:, 0]
        assert torch.equal(found, seen), seed
        assert starts is not None or all(seen[:, a : a + n, b : b + m].any() for a, n, b, m in blocks), seed
        blocks_of_nothing += 0 if longest else len(queries.runs) - len(blocks)
    assert blocks_of_nothing > 30


def test_every_rank_of_a_zigzag_computes_as_many_scores() -> None:
    """Two chunks of the last rank are neighbours, and uncut they would be one block of more work."""
    for ranks in (2, 4):
        parts = [replace(SequencePartition(divide(ranks, "zigzag")), rank=rank).held(12 * ranks)
                 for rank in range(ranks)]
        costs = [sum(b.queries * b.keys for k in parts for b in key_blocks(q, k, longest=q.count // 2)) for q in parts]
        assert len(set(costs)) == 1
        assert sum(b.queries * b.keys for k in parts for b in key_blocks(parts[-1], k)) > costs[0]


def test_blocks_by_runs_are_the_causal_mask() -> None:
    """Of every rank's keys, in every order: whole blocks, and squares of the queries' own positions."""
    squares = 0
    for ranks in (2, 3, 4):
        for order in ("contiguous", "zigzag", "drawn"):
            chunks = list(range(4 * ranks))
            random.Random(ranks).shuffle(chunks)
            parts = tuple(tuple(sorted(chunks[4 * i : 4 * i + 4])) for i in range(ranks))
            division = ChunkDivision(4 * ranks, parts) if order == "drawn" else divide(ranks, order)
            held = [SequencePartition(division, rank).held(8 * ranks) for rank in range(ranks)]
            for mine in held:
                longest = mine.count // 2 if division.chunks > ranks else 0
                for keys in held:
                    q, k = (x.index(torch.device("cpu")) for x in (mine, keys))
                    found = torch.zeros(len(q), len(k), dtype=torch.int64)
                    for (query, count, key, seen), mask, _ in blocks_by_runs(mine, keys, longest):
                        ones = torch.ones(count, seen, dtype=torch.int64)
                        assert mask.runs is None or (mask.runs == ((1, count),) and seen == count)
                        squares += mask.runs is not None
                        found[query : query + count, key : key + seen] += ones if mask.runs is None else ones.tril()
                    assert torch.equal(found, (k <= q[:, None]).long()), (ranks, order)
    assert squares
