"""Tiny corpora of drawn runs, and their batches: by the loaders that a run has, on any layout.

The corpora are written once into a folder of the temporary ones, where every rank finds them.
"""

from __future__ import annotations

import fcntl
import getpass
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.indexed import CorpusMeta, idx_path
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import sequence_partition
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.ext.corpora.writer import IndexedWriter
from megatron_port.tools.parity.emulation import Reordering
from megatron_port.tools.parity.recording import regroup

KINDS = {"short": 12, "mixed": 90, "masked": 40}
"""Corpora of each vocabulary, and the longest documents of each; of the masked one some labels do not count."""
TOKENS = 700
"""Of each corpus at least: a few epochs of it are in a run of long sequences, less than one in a run of short ones."""
EOD = 0


def corpus_folder() -> Path:
    """Return the folder of the corpora and their indices, the same for all processes of a user."""
    return Path(tempfile.gettempdir()) / f"megatron_port-drawn-corpora-{getpass.getuser()}"


def corpus_prefix(kind: str, vocab_size: int) -> str:
    """Return the prefix of one of ``KINDS``; its ids are below ``vocab_size``."""
    return str(corpus_folder() / f"{kind}-{vocab_size}")


def write_corpus(prefix: str) -> None:
    """Write a corpus that is not there, the same at any time; one process does, and the others wait."""
    Path(prefix).parent.mkdir(exist_ok=True)
    with open(f"{prefix}.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not idx_path(prefix).is_file():
            _write(prefix)


def _write(prefix: str) -> None:
    kind, _, size = Path(prefix).name.rpartition("-")
    r, vocab_size, tokens = random.Random(Path(prefix).name), int(size), 0
    with IndexedWriter(prefix, vocab_size=vocab_size, masked=kind == "masked") as writer:
        while tokens < TOKENS:
            # Often one more than the token before: there is something to learn.
            ids = [r.randrange(1, vocab_size)]
            for _ in range(r.randrange(KINDS[kind])):
                ids.append(ids[-1] % (vocab_size - 1) + 1 if r.random() < 0.5 else r.randrange(1, vocab_size))
            ids.append(EOD)
            mask = bytes(r.random() < 0.6 for _ in ids) if kind == "masked" else b""
            data = np.array(ids).astype(writer.dtype).tobytes()
            writer.add_block(np.array([len(ids)], dtype="<i4"), data, mask)
            tokens += len(ids)
        writer.describe(CorpusMeta(tokenizer="drawn", vocab_size=vocab_size, eod_id=EOD))


def loaded_batches(
    config: RunConfig, ctx: ParallelContext, reordering: Reordering | None = None
) -> Callable[[int], list[MicroBatch]]:
    """Return this rank's micro-batches of a step, by the loader that training has."""
    for prefix in config.data.train:
        write_corpus(prefix)
    schedule = BatchSchedule(config.batch, ctx.size("dp"))
    loader = build_loaders(
        config, dp_rank=ctx.index("dp"), dp_size=ctx.size("dp"), need_tokens=ctx.is_first_stage,
        need_labels=ctx.is_last_stage, train_samples=schedule.samples_before(config.training.steps),
        partition=sequence_partition(ctx.mesh, ctx.rank, order=config.layout.cp_order),
    ).train

    def batches(step: int) -> list[MicroBatch]:
        found = loader.step(*schedule.step_plan(step))
        return found if reordering is None else regroup(found, reordering)

    return batches
