"""How evenly an order of tokens divides attention among context-parallel ranks, over samples of documents.

    python benchmarks/context_order.py data/quickstart [--draws 1000] [--json FILE]

Work is counted, not timed: the keys that the tokens of a rank see, of the busiest rank over the mean. Samples begin at
any token of the corpus named, which `make quickstart` prepares; those of the heavy-tailed lengths at any token of
documents drawn from a log-normal distribution.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.core.data.dataset import document_starts
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.ext.context.balance import (
    attention_work,
    balanced_chunks,
    block_size,
    contiguous_chunks,
    imbalance,
    runs_of,
    zigzag_chunks,
)

CASES = ((8192, 2), (8192, 4), (8192, 8), (32768, 4), (32768, 8), (131072, 8), (131072, 16))
"""(tokens, ranks)"""
HEAVY = (3000.0, 2.0)
"""Mean and standard deviation of the logarithm of the heavy-tailed lengths: a median of 406 tokens and a mean of 3,000,
where one document in a hundred has more than 42,000."""
Draw = Callable[[int], np.ndarray]
"""Tokens → where the document of each position starts."""


def from_corpus(data: IndexedDataset, draw: np.random.Generator) -> Draw:
    """Samples that begin anywhere in a corpus."""
    def starts(seq_length: int) -> np.ndarray:
        position = int(draw.integers(0, data.num_tokens - seq_length))
        return document_starts(data.documents_in(position, seq_length), seq_length)

    return starts


def heavy_tailed(draw: np.random.Generator) -> Draw:
    """Samples that begin anywhere in a document."""
    mean, sigma = HEAVY

    def starts(seq_length: int) -> np.ndarray:
        count = 16 + 8 * int(seq_length / mean)
        edges = np.cumsum(np.ceil(draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)).astype(np.int64))
        return document_starts(edges - int(draw.integers(0, edges[-1])), seq_length)

    return starts


def measured(starts: Draw, seq_length: int, ranks: int, batch: int, draws: int) -> dict[str, Any]:
    """Imbalance of each order over the draws, and what finding a balanced one took."""
    size, found, runs, seconds = block_size(seq_length, ranks), [], [], 0.0
    for _ in range(draws):
        rows = np.stack([starts(seq_length) for _ in range(batch)])
        started = time.process_time()
        work = attention_work(rows).reshape(-1, size).sum(axis=1)
        chunks = balanced_chunks(work, ranks)
        seconds += time.process_time() - started
        orders = (chunks, zigzag_chunks(len(work), ranks), contiguous_chunks(len(work), ranks))
        found.append([imbalance(order, work) for order in orders])
        runs.append([runs_of(of_rank) for of_rank in chunks])
    over = np.array(found)
    summary = {
        name: {"mean": round(float(over[:, i].mean()), 4), "worst": round(float(over[:, i].max()), 4)}
        for i, name in enumerate(("balanced", "zigzag", "contiguous"))
    }
    counts = np.array(runs)
    return {
        **summary, "runs_mean": round(float(counts.mean()), 2), "runs_most": int(counts.max()),
        "processor_milliseconds": round(1e3 * seconds / draws, 2),
    }


def main() -> None:
    """Print a line for each case, and write them all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("corpus", help="prefix of a .bin/.idx pair")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    draw = np.random.default_rng(0)
    data = IndexedDataset(asked.corpus)
    sources = {"corpus": from_corpus(data, draw), "heavy-tailed": heavy_tailed(draw)}
    rows = []
    for source, starts in sources.items():
        for seq_length, ranks in CASES:
            for batch in (1, 2):
                case = {"documents": source, "seq_length": seq_length, "ranks": ranks, "micro_batch": batch}
                rows.append(case | measured(starts, seq_length, ranks, batch, asked.draws))
                print(json.dumps(rows[-1]), flush=True)
    lengths = np.diff(data.document_edges())
    about = {
        "documents": len(lengths), "tokens": int(lengths.sum()), "mean": round(float(lengths.mean())),
        "quantiles_1_10_50_90_99": [round(float(q)) for q in np.quantile(lengths, (0.01, 0.1, 0.5, 0.9, 0.99))],
    }
    if asked.json:
        asked.json.write_text(json.dumps({"draws": asked.draws, "corpus": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
