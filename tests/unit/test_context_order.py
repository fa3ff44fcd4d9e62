"""The balanced order of tokens: every block on one rank, as many on each, and work as attention's mask counts it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import DataConfig, LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.data.dataset import document_starts
from megatron_port.core.layers.attention import AttentionMask
from megatron_port.ext.context.balance import (
    GOOD,
    attention_work,
    balanced_chunks,
    block_size,
    contiguous_chunks,
    divisions_by_documents,
    imbalance,
    runs_of,
    zigzag_chunks,
)
from megatron_port.ext.mixers.chunks import chunk_starts


def drawn_starts(draw: np.random.Generator, seq: int, batch: int) -> np.ndarray:
    """Samples that begin in documents of log-normal lengths, from many short ones to one that outgrows the sample."""
    rows = []
    for _ in range(batch):
        mean, sigma = seq * 2.0 ** draw.uniform(-6, 2), draw.uniform(0, 2.5)
        edges = np.cumsum(np.ceil(draw.lognormal(np.log(mean), sigma, 16 + int(8 * seq / mean))).astype(np.int64))
        rows.append(document_starts(edges - int(draw.integers(0, edges[0])), seq))
    return np.stack(rows)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 999), st.sampled_from([
    ((0, 0),), ((5, 0),), ((0, 0), (3, 0), (3, 0)), ((0, 4), (0, 4), (0, 0)), ((2, 7),),
]))
def test_work_is_what_the_masks_of_the_layers_show(
    seq: int, batch: int, seed: int, sights: tuple[tuple[int, int], ...]
) -> None:
    starts = drawn_starts(np.random.default_rng(seed), seq, batch)
    x, documents = torch.zeros(seq, batch), torch.from_numpy(starts)
    masks = [
        AttentionMask(window=window, first=chunk_starts(documents, seq, x, chunk) if chunk else documents)
        for window, chunk in sights
    ]
    seen = torch.stack([mask.visible(seq, seq, torch.device("cpu")).sum((0, 1, 3)) for mask in masks]).sum(0)
    assert attention_work(starts, sights).tolist() == seen.tolist()


@pytest.mark.parametrize(("seq", "ranks"), [(512, 2), (1024, 4), (8192, 8), (8192, 16), (32768, 4)])
def test_each_rank_has_as_many_blocks_and_as_much_work(seq: int, ranks: int) -> None:
    draw, size = np.random.default_rng(seq + ranks), block_size(seq, ranks)
    worse = 0
    for _ in range(40):
        work = attention_work(drawn_starts(draw, seq, int(draw.integers(1, 4)))).reshape(-1, size).sum(axis=1)
        found = balanced_chunks(work, ranks)
        assert sorted(block for chunks in found for block in chunks) == list(range(len(work)))
        assert {len(chunks) for chunks in found} == {len(work) // ranks}
        assert all(list(chunks) == sorted(chunks) for chunks in found)
        assert imbalance(found, work) <= 1.05
        assert found == balanced_chunks(work.copy(), ranks)
        worse += imbalance(zigzag_chunks(len(work), ranks), work) > 1.05
        assert sum(map(runs_of, found)) <= 4 * ranks
    assert worse >= 20, "these samples would not need a balance"


def test_layers_without_attention_are_not_balanced() -> None:
    model = ModelConfig(
        num_layers=4, mixer_pattern=("short_conv", "attention"), attention_chunk=64, sliding_window=32,
        attention_pattern=("full", "full", "window", "chunk"), recurrent=RecurrentConfig(heads=4),
    )
    config = RunConfig(
        model=model, layout=LayoutConfig(context_parallel_size=2, cp_order="balanced"),
        data=DataConfig(attention_documents="within"),
    )
    found = divisions_by_documents(config, 2)
    assert isinstance(found, partial) and found.args[0] == ((0, 0), (0, 64))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_document_or_a_narrow_window_needs_no_cuts(ranks: int) -> None:
    starts, size = np.zeros((2, 4096), dtype=np.int32), block_size(4096, ranks)
    work = attention_work(starts).reshape(-1, size).sum(axis=1)
    found = balanced_chunks(work, ranks)
    assert imbalance(found, work) <= GOOD and sum(map(runs_of, found)) <= 2 * ranks
    windowed = attention_work(starts, ((4, 0),)).reshape(-1, size).sum(axis=1)
    assert balanced_chunks(windowed, ranks) == contiguous_chunks(len(work), ranks)


@given(st.integers(1, 9), st.integers(1, 700))
def test_blocks_make_up_the_chunks_of_zigzag(ranks: int, size: int) -> None:
    seq = 2 * ranks * size
    block = block_size(seq, ranks)
    assert size % block == 0 and 1 <= block <= 128
    with pytest.raises(ValueError, match="does not divide"):
        block_size(seq + 1, ranks + 1 if seq % (ranks + 1) else ranks)
