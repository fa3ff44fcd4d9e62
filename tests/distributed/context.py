"""Sequences divided over ranks train as on one process, on any layout, and as a plain GPT on whole sequences.

``draw(seed)`` is a pure function. Samples come through the run's own loaders from a source that knows where the layout
cuts: documents that begin or end on a cut, documents of one token, and masks that leave a rank, a replica or a step
without a label that counts. Half of the draws have models that ``plain_gpt``, which shares no code with the package,
computes too. Run many, resumably, with
``python tests/distributed/context.py --seeds 0-199 --out benchmarks/results/context-parallel.jsonl``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drawing
import fuzz
import numpy as np
import torch
from cases import LR, Batches, Reordering, _alone, make_config, run_case
from pool import RankPool

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.dataset import Sample, document_starts
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.positions import sequence_partition
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.core.registry import SOURCES
from megatron_port.tools.parity.comparison import FP32, FP64, Deviation, Run, compare
from megatron_port.tools.parity.run_record import RankTrace

STEPS = 3
METHODS, ORDERS = ("gather", "heads", "ring"), ("contiguous", "zigzag", "balanced")
DOCUMENTS = ("none", "drawn", "single", "edge", "mixed")
"""Of a sample: none; at drawn positions; each token one, or one of one token at a cut; at cuts, or beside them."""
MASKS = ("all", "random", "rank", "one")
"""Labels that count: all; drawn ones, and in the second step none; of one chunk of the sequence; one of the batch, the
last of a chunk, so that its token is another rank's."""


class Divided:
    """Samples for a layout that cuts sequences; ``data.source = "divided"``. The run's name says what they are:
    documents, mask, and the number of equal chunks at whose edges something happens."""

    def __init__(self, run: RunConfig) -> None:
        documents, mask, chunks = run.name.split("-")
        self.documents, self.mask, self.chunks = documents, mask, int(chunks)
        self.seq, self.vocab, self.seed = run.model.seq_length, run.model.vocab_size, run.seed
        self.batch = run.batch.global_batch_size
        self.masked = mask != "all"

    def __len__(self) -> int:
        return 1 << 20

    def draw(self, seed: int, k: int) -> Sample:
        """Return sample k, whose tokens depend on the run's seed."""
        return self.sample(k)

    def sample(self, index: int) -> Sample:
        """Return a sample."""
        r = np.random.default_rng([self.seed, index])
        tokens = r.integers(self.vocab, size=self.seq + 1)
        starts = None if self.documents == "none" else document_starts(self._edges(r, index), self.seq)
        return Sample(tokens, starts, self._counted(r, index) if self.masked else None)

    def _edges(self, r: np.random.Generator, index: int) -> np.ndarray:
        cuts = np.arange(1, self.chunks) * (self.seq // self.chunks)
        kind = self.documents if self.documents != "mixed" else DOCUMENTS[1 + index % 3]
        if kind == "drawn":
            return r.choice(self.seq, size=min(1 + index % 4, self.seq), replace=False)
        if kind == "single":
            at = int(r.choice(cuts)) - index % 2  # a chunk's first or last token
            return np.arange(self.seq) if index % 3 == 0 else np.array([at, at + 1])
        some = cuts[r.random(len(cuts)) < 0.6]
        return some if index % 2 else some + r.integers(-1, 2, size=len(some))

    def _counted(self, r: np.random.Generator, index: int) -> np.ndarray:
        step, number = divmod(index, self.batch)
        counted = np.zeros(self.seq, dtype=bool)
        size = self.seq // self.chunks
        chunk = (3 * step + 1) % self.chunks
        if self.mask == "random" and step != 1:
            counted = r.random(self.seq) < (0.2, 0.9, 0.5)[index % 3]
            counted[0] = True
        elif self.mask == "rank":
            counted[chunk * size : (chunk + 1) * size] = r.random(size) < 0.7
            counted[(chunk + 1) * size - 1] = True
        elif self.mask == "one" and number == self.batch - 1:
            counted[(chunk + 1) * size - 1] = True
        return counted


if "divided" not in SOURCES.added:  # the module is also the program
    SOURCES.add("divided", lambda run, split: Divided(run))


@dataclasses.dataclass(frozen=True)
class ContextDraw(drawing.Draw):
    """A combination with divided sequences."""

    plain: bool
    """``plain_gpt`` computes it too."""

    @property
    def refused(self) -> str:
        """Why the configuration is refused, without its numbers; empty: it is not."""
        found = problems(self.config, world_size=self.topology.world_size)
        return re.sub(r"\d+", "#", found[0].splitlines()[0]) if found else ""

    def describe(self) -> dict[str, object]:
        """For the results file."""
        documents, mask, _ = self.config.name.split("-")
        return {**super().describe(), "documents": documents, "mask": mask, "plain": self.plain}


def draw(seed: int) -> ContextDraw:
    """A combination; every run with the same seed gives the same. Of every nine seeds one is of engine deepspeed."""
    r = random.Random(f"context-{seed}")
    t, method, order = _sizes(r), r.choice(METHODS), r.choice(ORDERS)
    plain = r.random() < 0.5
    engine = "deepspeed" if seed % 9 == 5 else "native"
    layout = drawing._layout(r, t, engine) | {
        "context_parallel_size": t.cp, "cp_method": method, "cp_order": order,
    }
    sequence = layout["sequence_parallel"] = layout["sequence_parallel"] and t.tp > 1
    # The balanced order wants more and smaller blocks.
    seq = (8 if order == "balanced" else 2) * t.cp * (t.tp if sequence else 1)
    seq *= r.choice((1, 2, 3)) if seq < 32 else 1
    model = _plain_model(r, t) if plain else drawing._latent(r, drawing._model(r, t))
    model |= _heads(r, t, method, model) | {"seq_length": seq}
    model |= _mask(random.Random(f"mask-{seed}"), t, seq)
    if not model.get("kv_lora_rank"):
        model["attention_gate"] = random.Random(f"gate-{seed}").random() < 0.25
    if not model["sliding_window"]:
        model.pop("window_rope_theta", None)
    stages = t.pp * layout.get("virtual_pipeline_size", 1)
    model["num_layers"] = max(stages + r.choice((0, 0, 1)), len(model.get("attention_pattern", ())))
    documents, mask = r.choice(DOCUMENTS), r.choice(MASKS)
    rope = model["position_embedding"] == "rope"
    if rope and not plain and engine == "native" and r.random() < 0.3:
        model |= {"mtp_layers": r.choice((1, 2)), "mtp_weight": 0.3}
    micro = r.choice((1, 1, 2))
    dtype = r.choice(("fp64", "fp64", "fp64", "fp32")) if engine == "native" else "fp32"
    config = make_config(
        engine=engine, dtype=dtype, model=model, layout=layout, clip_grad=r.choice((0.0, 0.1, 0.5)),
        own_kernels=r.choice(("on", "off")), micro_batch_size=micro,
        global_batch_size=micro * t.dp * r.choice((1, 2, 3)),
        data={"source": "divided", "attention_documents": "across" if documents == "none" else "within",
              "position_reset": documents != "none" and not rope and r.random() < 0.5},
    )
    config = drawing.served(_sharded(r, config, t))
    config = dataclasses.replace(
        config, seed=seed, name=f"{documents}-{mask}-{2 * t.cp}",
        checkpoint=dataclasses.replace(config.checkpoint, asynchronous=False),
    )
    config = drawing._planned(random.Random(f"activations-{seed}"), config)
    return ContextDraw(seed, drawing._offloaded(random.Random(f"offload-{seed}"), config), t, plain)


def _sizes(r: random.Random) -> Topology:
    """cp 2, 4 or 3 with at most eight ranks, mostly four."""
    most = r.choice((4, 4, 8))
    cp = r.choices((2, 4, 3), (6, 3, 1))[0]
    while True:
        tp, pp, dp = r.choice((1, 1, 2)), r.choice((1, 1, 2)), r.choice((1, 1, 2, 4))
        if tp * pp * dp * cp <= most:
            return Topology(tp, pp, dp, cp=cp)


def _plain_model(r: random.Random, t: Topology) -> dict[str, Any]:
    """A model that ``plain_gpt`` has."""
    llama = r.random() < 0.5
    rope = llama or r.random() < 0.3
    model: dict[str, Any] = {
        "hidden_size": r.choice((24, 32)), "num_attention_heads": 2 * t.tp, "num_query_groups": r.choice((t.tp, 1)),
        "head_dim": r.choice((4, 8)), "ffn_hidden_size": t.tp * 9, "vocab_size": r.choice((31, 53, 64)),
        "position_embedding": "rope" if rope else "learned", "normalization": "rmsnorm" if llama else "layernorm",
        "activation": "swiglu" if llama else r.choice(("gelu", "gelu_tanh")), "add_bias": not llama,
        "tie_embeddings": r.random() < 0.5, "init_std": 0.04, "hidden_dropout": r.choice((0.0, 0.1)),
        "attention_dropout": r.choice((0.0, 0.0, 0.1)), "qk_norm": r.random() < 0.3,
    }
    if rope:
        model["rope_theta"] = r.choice((10000.0, 500.0))
    return model


def _heads(r: random.Random, t: Topology, method: str, model: dict[str, Any]) -> dict[str, Any]:
    """Heads for the method "heads": of keys and values on a tensor-parallel rank a multiple of cp, or one, which has
    copies then."""
    if method != "heads":
        return {}
    latent = "kv_lora_rank" in model
    if latent or r.random() < 0.7:
        groups = t.tp * t.cp * r.choice((1, 1, 2))
        heads = groups * (1 if latent else r.choice((1, 2)))
    else:
        groups, heads = t.tp, t.tp * t.cp * r.choice((1, 2))
    return {"num_attention_heads": heads, "num_query_groups": 0 if groups == heads else groups,
            "head_dim": model["head_dim"] or 4}


def _mask(r: random.Random, t: Topology, seq: int) -> dict[str, Any]:
    """Windows about as long as a chunk, sinks and soft-caps, in half of the models."""
    if r.random() < 0.5:
        return {"sliding_window": 0, "attention_pattern": ()}
    chunk = seq // t.cp
    return {
        "sliding_window": r.choice((1, 2, chunk // 2, chunk, chunk + 1, seq)),
        "attention_pattern": r.choice(((), ("window", "full"), ("full", "window"))),
        "attention_sinks": r.random() < 0.4, "attention_softcap": r.choice((0.0, 0.0, 0.5)),
    }


def _sharded(r: random.Random, config: RunConfig, t: Topology) -> RunConfig:
    """ZeRO stage 3 in half of the draws that have the highest stage before it; with four replicas, state divided over
    two in half of them."""
    layout = config.layout
    change: dict[str, Any] = {}
    if config.engine == "native" and layout.zero_stage and t.dp == 4 and r.random() < 0.5:
        change["shard_size"] = 2
    if config.engine == "native" and layout.zero_stage == drawing.before_stage_3(layout) and r.random() < 0.5:
        change |= {"zero_stage": 3, "reshard": r.choice(("forward", "step"))}
    return dataclasses.replace(config, layout=dataclasses.replace(layout, **change))


def batches(config: RunConfig, ctx: ParallelContext, order: Reordering | None) -> Batches:
    """This rank's micro-batches, from the run's loaders."""
    schedule = BatchSchedule(config.batch, ctx.size("dp"))
    loader = build_loaders(
        config, dp_rank=ctx.index("dp"), dp_size=ctx.size("dp"), need_tokens=ctx.is_first_stage,
        need_labels=ctx.is_last_stage, partition=sequence_partition(ctx.mesh, ctx.rank, order=config.layout.cp_order),
    ).train
    return lambda step: loader.step(*schedule.step_plan(step))


def run_ranks(cases: Sequence[tuple[RunConfig, Topology]]) -> list[RankTrace]:
    """Several cases of one world size on this rank."""
    return [run_case(*case, STEPS, make=batches) for case in cases]


def alone(config: RunConfig) -> Run:
    """The run of one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Run.of(run_ranks([(_alone(fuzz.plain(config)), Topology())]))
    finally:
        torch.set_num_threads(threads)


def plain_run(config: RunConfig) -> Run:
    """The run of ``plain_gpt``."""
    import plain_gpt

    source, model = Divided(config), dataclasses.asdict(config.model)
    fields = {f.name for f in dataclasses.fields(plain_gpt.Network)}
    network = plain_gpt.Network(**{name: value for name, value in model.items() if name in fields} | {
        "num_query_groups": config.model.kv_heads, "ffn_hidden_size": config.model.ffn_size,
    })

    def batch(step: int) -> plain_gpt.Batch:
        samples = tuple(range(step * source.batch, (step + 1) * source.batch))
        rows = [source.sample(k) for k in samples]
        return plain_gpt.Batch(
            samples, np.stack([row.tokens for row in rows]),
            None if source.documents == "none" else np.stack([row.starts for row in rows if row.starts is not None]),
            np.stack([row.counted for row in rows if row.counted is not None]) if source.masked else None,
            config.data.position_reset,
        )

    steps = plain_gpt.train(network, config.seed, dataclasses.asdict(config.optimizer), LR, batch, STEPS)
    return Run(tuple(steps.losses), tuple(steps.norms), *steps.eval_losses, (steps.gradients,), steps.weights, ())


def judge(one: ContextDraw, ranks: Sequence[RankTrace]) -> list[Deviation]:
    """Compare with one process and, where it can be, with the plain GPT."""
    run, exact = Run.of(ranks), one.config.precision.dtype == "fp64"
    bounds, lr, model = FP64 if exact else FP32, LR if exact else 0.0, one.config.model
    found = compare(alone(one.config), run, bounds, model, lr=lr)
    if one.plain:
        apart = compare(plain_run(one.config), run, bounds, model, lr=lr)
        found += [dataclasses.replace(d, quantity=f"plain {d.quantity}") for d in apart]
    return found


def run_draws(ranks: RankPool, draws: Sequence[ContextDraw]) -> list[tuple[drawing.Draw, list[Deviation]]]:
    """Run draws, those of one world and engine on the same ranks."""
    out: list[tuple[drawing.Draw, list[Deviation]]] = []
    for world, deepspeed in sorted({(d.topology.world_size, d.config.engine == "deepspeed") for d in draws}):
        members = [
            d for d in draws if (d.topology.world_size, d.config.engine == "deepspeed") == (world, deepspeed)
        ]
        cases = [(d.config, d.topology) for d in members]
        results = ranks.run(world, run_ranks, cases, timeout=120.0 + 60.0 * len(cases), deepspeed=deepspeed)
        out += [(d, judge(d, [result[i] for result in results])) for i, d in enumerate(members)]
    return out


def main() -> int:
    """Run a range of seeds, append a line each to a file, skip those that are in it; say what is refused, and why."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-199", type=fuzz.seed_range)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", default=16, type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draws = list(map(draw, args.seeds))
    refused = collections.Counter(one.refused for one in draws if one.refused)
    for why, count in refused.most_common():
        print(f"{count} of {len(draws)} refused: {why}", flush=True)
    legal: list[Any] = [one for one in draws if not one.refused]
    run: Any = run_draws
    return fuzz.run_resumable(legal, args.out, batch_size=args.batch, seconds=args.seconds, run=run)


if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the twin
    import context  # ranks take functions of modules that they can import

    sys.exit(context.main())
