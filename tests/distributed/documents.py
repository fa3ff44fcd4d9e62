"""A document's gradient beside others in a sample equals that of the same document alone, on any layout.

``draw(seed)`` is a pure function. The reference is one process that gets each document as a sample of its own, with
``attention_documents = "across"``: it runs none of the code that knows documents. Every label of a document counts, or
those of one document in the whole batch. Run many, resumably, with
``python tests/distributed/documents.py --seeds 0-99 --out benchmarks/results/documents.jsonl``.

Rotary angles are float64 in both: float32 ones, as training has them, differ by rounding between a document at position
0 and the same one further on.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import drawing
import fuzz
import torch
from cases import Batches, Reordering, make_batches, make_config, run_case
from pool import RankPool

from megatron_port.core.config.schema import ActivationsConfig, LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.model import rotary
from megatron_port.core.model.spec import Rotation
from megatron_port.tools.parity.comparison import Deviation, Run, Tolerance, compare
from megatron_port.tools.parity.run_record import RankTrace

BOUND = Tolerance("documents", loss=1e-12, grad_norm=1e-12, gradient=1e-12, key_bias=1e-12)


def draw(seed: int) -> drawing.Draw:
    """A combination; the eight layouts come in turn."""
    r = random.Random(f"documents-{seed}")
    tp, pp, dp = (1 + (seed >> i & 1) for i in range(3))
    t = Topology(tp, pp, dp)
    model, layout = drawing._model(r, t), drawing._layout(r, t, "native")
    if t.world_size == 1:
        layout |= {"pipeline_schedule": "1f1b", "virtual_pipeline_size": 1}
    stages = t.pp * layout["virtual_pipeline_size"]
    model |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_layers": stages + r.choice((0, 1))}
    micro = r.choice((1, 2, 3))
    config = make_config(
        dtype="fp64", model=model, layout=layout, micro_batch_size=micro, mask_loss=r.random() < 0.3,
        global_batch_size=micro * t.dp * r.choice((1, 2, 3)),
        data={"attention_documents": "within", "position_reset": model["position_embedding"] == "learned"},
    )
    if config.layout.zero_stage == drawing.before_stage_3(config.layout) and r.random() < 0.3:
        config = dataclasses.replace(config, layout=dataclasses.replace(config.layout, zero_stage=3))
    return drawing.Draw(seed, dataclasses.replace(config, seed=seed), t)


def counted(seed: int, batch: MicroBatch, total: int) -> MicroBatch:
    """Of every second seed, the micro-batch with the labels of one document counted: of one sample of the step."""
    starts = batch.document_starts
    assert starts is not None
    if seed % 2:
        return batch
    mask = torch.zeros(starts.shape)
    for row, sample in enumerate(batch.sample_ids):
        if sample == seed // 2 % total:
            mask[row] = (starts[row] == starts[row, seed * 7 % starts.shape[1]]).float()
    return dataclasses.replace(batch, loss_mask=None if batch.labels is None else mask, labels_masked=True)


def packed(config: RunConfig, ctx: ParallelContext, order: Reordering | None) -> Batches:
    """Samples of several documents, on this rank."""
    batches, total = make_batches(config, ctx, order), config.batch.global_batch_size
    return lambda step: [counted(config.seed, batch, total) for batch in batches(step)]


def alone(config: RunConfig, ctx: ParallelContext, order: Reordering | None) -> Batches:
    """The same documents, each a sample of its own; those of which no label counts are left out."""
    within = dataclasses.replace(config, data=dataclasses.replace(config.data, attention_documents="within"))
    return lambda step: [one for batch in packed(within, ctx, order)(step) for one in _documents(batch)]


def _documents(batch: MicroBatch) -> Iterator[MicroBatch]:
    tokens, labels, starts = batch.tokens, batch.labels, batch.document_starts
    assert tokens is not None and labels is not None and starts is not None
    mask = torch.ones(tokens.shape) if batch.loss_mask is None else batch.loss_mask
    for row, sample in enumerate(batch.sample_ids):
        edges = [*sorted(set(starts[row].tolist())), tokens.shape[1]]
        for a, b in zip(edges, edges[1:]):
            if mask[row, a:b].any():
                yield MicroBatch((sample,), tokens=tokens[row, None, a:b], labels=labels[row, None, a:b],
                                 loss_mask=mask[row, None, a:b])


@contextmanager
def exact_angles() -> Iterator[None]:
    """Rotary angles in float64, of the frequencies that training has."""
    before = rotary.frequencies

    def wider(model: ModelConfig, device: torch.device | str, rotation: Rotation = "usual") -> torch.Tensor:
        return before(model, device, rotation).double()

    rotary.frequencies = wider
    try:
        yield
    finally:
        rotary.frequencies = before


def run_packed(cases: Sequence[tuple[RunConfig, Topology]]) -> list[RankTrace]:
    """Several cases of one world size on this rank."""
    with exact_angles():
        return [_without_evaluation(run_case(*case, 1, make=packed)) for case in cases]


def _without_evaluation(trace: RankTrace) -> RankTrace:
    """Evaluation takes the mean of other numbers of samples on one process with documents alone."""
    return dataclasses.replace(trace, final_eval_loss=None)


def judge(one: drawing.Draw, traces: Sequence[RankTrace]) -> list[Deviation]:
    """Compare with the documents alone on one process: the loss, its gradient by name, the norm."""
    config = dataclasses.replace(
        one.config, layout=LayoutConfig(vocab_padding_multiple=1), activations=ActivationsConfig(),
        data=dataclasses.replace(one.config.data, attention_documents="across", position_reset=False),
    )
    with exact_angles():
        reference = _without_evaluation(run_case(config, Topology(), 1, make=alone))
    return compare(Run.of([reference]), Run.of(traces), BOUND, config.model)


def run_draws(ranks: RankPool, draws: Sequence[drawing.Draw]) -> list[tuple[drawing.Draw, list[Deviation]]]:
    """Run draws, those of one world on the same ranks."""
    out = []
    for world in sorted({one.topology.world_size for one in draws}):
        members = [one for one in draws if one.topology.world_size == world]
        cases = [(one.config, one.topology) for one in members]
        results = ranks.run(world, run_packed, cases, timeout=60.0 + 30.0 * len(cases)) if world > 1 else [
            run_packed(cases)
        ]
        out += [(one, judge(one, [result[i] for result in results])) for i, one in enumerate(members)]
    return out


def main() -> int:
    """Run a range of seeds, append a line each to a file, skip those that are in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-99", type=fuzz.seed_range)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draws = list(map(draw, args.seeds))
    return fuzz.run_resumable(draws, args.out, batch_size=16, seconds=args.seconds, run=run_draws)


if __name__ == "__main__":
    import documents  # ranks take functions of modules that they can import

    sys.exit(documents.main())
