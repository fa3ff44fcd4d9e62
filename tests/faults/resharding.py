"""A run resumes in another layout, engine or precision: the state arrives to the bit, the losses within tolerance.

``draw(seed)`` is a pure function of the seed. The judge is tools/parity/comparison.py: fp64 and the first step of fp32
against its fixed bounds, everything else against twice the spread of one process under the eight committed
reorderings, which starts from the same checkpoint. Run many, resumably, with
``python tests/faults/resharding.py --seeds 0-29 --out FILE``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from cases import LR, REORDERINGS, Reordering, make_batches, make_config, providers_of
from pool import RankPool

from megatron_port.core.checkpoint.format import SavedState, directory_name
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.writer import peers_of, save_checkpoint
from megatron_port.core.config.schema import LayoutConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.engine.api import Engine
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.core.optim.rules import ADAMW, mixed_kinds, state_kinds
from megatron_port.run.build import build_engine, state_records
from megatron_port.tools.parity.comparison import FP32, FP64, SPREAD_FACTOR, Deviation, Run, Tolerance, compare, spread
from megatron_port.tools.parity.emulation import apply_reduction_order

SAVE_AT = 3
MORE = 3
Numbers = list[tuple[float, float | None]]
"""(loss, gradient norm) of each step."""


@dataclass(frozen=True)
class Side:
    """Where a run comes from, or goes to."""

    config: RunConfig
    topology: Topology

    def __str__(self) -> str:
        c, t = self.config, self.topology
        layout = c.layout
        words = [c.engine, f"tp{t.tp} pp{t.pp} dp{t.dp}", c.precision.dtype]
        words += ["sp"] if layout.sequence_parallel else []
        words += [f"recompute {c.activations.policy}"] if c.activations.policy != "none" else []
        words += [layout.pipeline_schedule] if t.pp > 1 and layout.pipeline_schedule != "1f1b" else []
        words += [f"{layout.virtual_pipeline_size} chunks"] if layout.virtual_pipeline_size > 1 else []
        words += [f"ZeRO-{layout.zero_stage}"] if t.dp > 1 else []
        words += [f"shards over {layout.shard_size}"] if layout.shard_size else []
        words += [f"ep{layout.expert_parallel_size}"] if c.model.moe.enabled else []
        words += [f"padding {layout.vocab_padding_multiple}"] if layout.vocab_padding_multiple > 1 else []
        return " ".join([*words, f"micro-batch {c.batch.micro_batch_size}"])

    @property
    def deepspeed(self) -> bool:
        """It needs ranks that have DeepSpeed."""
        return self.config.engine == "deepspeed"


@dataclass(frozen=True)
class RoundTrip:
    """A pair."""

    seed: int
    source: Side
    target: Side


def draw(seed: int) -> RoundTrip:
    """Both sides of one model; every run with the same seed gives the same."""
    r = random.Random(f"crossing-{seed}")
    model: dict[str, Any] = {
        "num_layers": r.choice((3, 4)), "hidden_size": 32, "num_attention_heads": 4,
        "vocab_size": r.choice((53, 64, 97)), "seq_length": 16,
        "tie_embeddings": r.random() < 0.6, "hidden_dropout": r.choice((0.0, 0.1)),
    }
    if r.random() < 0.3:
        model |= {"position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu",
                  "ffn_hidden_size": 48, "add_bias": False}
    engines = (r.choice(("native", "deepspeed")), r.choice(("native", "deepspeed")))
    if engines == ("native", "native"):
        pair = r.choice((("fp64", "fp64"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp16", "bf16"), ("bf16", "fp32")))
    else:
        pair = r.choice((("fp32", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")))
    while True:
        sides = [_side(r, model, engine, dtype) for engine, dtype in zip(engines, pair)]
        if sides[0].topology != sides[1].topology or engines[0] != engines[1]:
            # Of a stream of their own, so that what was drawn before these options existed stays what it was.
            more = random.Random(f"crossing-native-{seed}")
            layers = max([model["num_layers"], *(2 * side.topology.pp for side in sides if not side.deepspeed)])
            return RoundTrip(seed, *(_native(more, side, layers) for side in sides))


def _native(r: random.Random, side: Side, layers: int) -> Side:
    """With so many layers; on engine native, with a schedule, a ZeRO stage and buckets that only it has."""
    side = dataclasses.replace(
        side, config=dataclasses.replace(side.config, model=dataclasses.replace(side.config.model, num_layers=layers))
    )
    if side.deepspeed:
        return side
    pp, before = side.topology.pp, side.config.layout
    schedules = [(before.pipeline_schedule, 1)]
    if pp > 1:
        schedules += [("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)]
    schedule, chunks = r.choice(schedules)
    layout = dataclasses.replace(
        before, pipeline_schedule=schedule, virtual_pipeline_size=chunks, zero_stage=r.choice((0, 1, 1)),
        reduce_bucket_size=r.choice((500, 4000, 1 << 25)),
    )
    # Of what was drawn alone: a field that is added to the layout changes no pair.
    drawn = f"{layout.zero_stage}-{schedule}-{layout.reduce_bucket_size}-5"
    layout = _sharded(random.Random(f"sharded-{drawn}"), layout, side.topology.dp)
    topology = dataclasses.replace(
        side.topology, vp=chunks, folded=schedule == "zb-v", shard=layout.shard_size
    )
    return Side(dataclasses.replace(side.config, layout=layout), topology)


def _sharded(r: random.Random, layout: LayoutConfig, dp: int) -> LayoutConfig:
    """With gradient sums or weights sharded as well, over all replicas or over some."""
    if dp == 1 or not layout.zero_stage or r.random() < 0.5:
        return layout
    stage: Any = r.choice((3, 3, 2) if not layout.pipeline_schedule.startswith("zb-") else (3,))
    reshard: Any = r.choice(("forward", "step")) if stage == 3 else "forward"
    shard = r.choice([0, *(n for n in range(2, dp) if dp % n == 0)])
    return dataclasses.replace(layout, zero_stage=stage, reshard=reshard, shard_size=shard)


def _side(r: random.Random, model: dict[str, Any], engine: str, dtype: str) -> Side:
    while True:
        tp, pp, dp = r.choice((1, 2, 4)), r.choice((1, 2, 3)), r.choice((1, 2, 4))
        micro = r.choice((1, 2, 4))
        if tp * pp * dp <= 8 and 8 % (micro * dp) == 0 and pp <= model["num_layers"]:
            break
    layout = {
        "sequence_parallel": tp > 1 and r.random() < 0.5, "recompute": r.choice(("none", "selective", "full")),
        "pipeline_schedule": "1f1b" if engine == "deepspeed" else r.choice(("gpipe", "1f1b")),
        "vocab_padding_multiple": r.choice((1, 8, 16)),
    }
    config = make_config(engine=engine, dtype=dtype, model=model, layout=layout, micro_batch_size=micro)
    return Side(config, Topology(tp, pp, dp))


# ---------------------------------------------------------------- on the ranks


def _steps(engine: Engine, config: RunConfig, ctx: ParallelContext, start: int, count: int,
           reordering: Reordering | None = None) -> Numbers:
    batches, out = make_batches(config, ctx, reordering), []
    for step in range(start, start + count):
        result = engine.train_step(batches(step), step=step, lr=LR)
        out.append((result.loss, result.grad_norm))
    return out


def _save(engine: Engine, config: RunConfig, folder: Path) -> None:
    records = state_records(config.model)
    state = SavedState(
        step=SAVE_AT, samples=0, tokens=0, layout=config.layout, config={}, scalars=engine.scalar_state(), extra={},
        kinds=mixed_kinds(state_kinds(ADAMW, records.values())),
    )
    save_checkpoint(
        folder, state, engine.state_pieces(), peers=peers_of(dist.group.WORLD),
        expected={name: record.shape for name, record in records.items()},
    )


def train_and_save(side: Side, folder: Path) -> Numbers:
    """Train from the start, save, and continue."""
    ctx = ParallelContext.create(side.topology, "cpu")
    try:
        engine = build_engine(side.config, ctx, providers_of(side.config))
        _steps(engine, side.config, ctx, 0, SAVE_AT)
        _save(engine, side.config, folder)
        return _steps(engine, side.config, ctx, SAVE_AT, MORE)
    finally:
        ctx.close()


def resume(side: Side, folder: Path, again: Path) -> Numbers:
    """Load what another side saved, save it at once to ``again``, and continue."""
    ctx = ParallelContext.create(side.topology, "cpu")
    try:
        engine = build_engine(side.config, ctx, providers_of(side.config), initialise=False)
        checkpoint = open_checkpoint(folder / directory_name(SAVE_AT))
        engine.load_state(checkpoint.read, checkpoint.scalars)
        _save(engine, side.config, again)
        for record, parameter in engine.named_parameters():
            master = checkpoint.read(record.name, "weight", record.offset, record.extent)
            if not torch.equal(record.local_view(parameter.detach()), master.to(parameter.dtype)):
                raise AssertionError(f"{record.name} as it is used is not what was saved")
        return _steps(engine, side.config, ctx, SAVE_AT, MORE)
    finally:
        ctx.close()


def reordered(config: RunConfig, folder: Path, reorderings: Sequence[Reordering | None]) -> list[Numbers]:
    """One process resumes from the checkpoint, once for each reordering (None: as it is)."""
    out = []
    for reordering in reorderings:
        ctx = ParallelContext.create(Topology(), "cpu")
        try:
            engine = build_engine(config, ctx, providers_of(config), initialise=False)
            checkpoint = open_checkpoint(folder / directory_name(SAVE_AT))
            engine.load_state(checkpoint.read, checkpoint.scalars)
            if reordering is not None:
                apply_reduction_order(engine.stage, reordering)  # type: ignore[attr-defined]
            out.append(_steps(engine, config, ctx, SAVE_AT, MORE, reordering))
        finally:
            ctx.close()
    return out


# ---------------------------------------------------------------- the judge


def _whole(checkpoint: Checkpoint, name: str, kind: str) -> torch.Tensor:
    shape = checkpoint.shape(name, kind)
    return checkpoint.read(name, kind, (0,) * len(shape), shape)


def state_faults(
    before: Path, after: Path, names: set[str], *, same_precision: bool, buffers: Set[str] = frozenset()
) -> list[str]:
    """In what two checkpoints differ, every tensor gathered whole. No tolerance."""
    one, two = (open_checkpoint(p / directory_name(SAVE_AT)) for p in (before, after))
    out = []
    if not set(one.names()) == set(two.names()) == names:
        out.append(f"parameters {sorted(set(one.names()) ^ set(two.names()))}")
    if not set(one.names("buffer")) == set(two.names("buffer")) == buffers:
        out.append(f"buffers {sorted(one.names('buffer'))} against {sorted(two.names('buffer'))}")
    kinds = (*(["buffer"] if buffers else []), "exp_avg", "exp_avg_sq", "weight")
    if one.kinds() != kinds or two.kinds() != kinds:
        out.append(f"kinds {one.kinds()} against {two.kinds()}")
    for kind in one.kinds():
        moved = 0.0
        for name in one.names(kind):
            a, b = _whole(one, name, kind), _whole(two, name, kind)
            if a.dtype != b.dtype or not torch.equal(a, b):
                out.append(f"{kind} of {name}")
            moved = max(moved, float(a.abs().max()))
        if moved == 0.0:
            out.append(f"{kind} is zero everywhere: nothing was compared")
    here, there = one.scalars, two.scalars
    if here["optimizer_steps"] != there["optimizer_steps"] or (same_precision and here != there):
        out.append(f"scalars {here} against {there}")
    return out


def _run(numbers: Numbers) -> Run:
    losses, norms = (tuple(column) for column in zip(*numbers))
    return Run(losses, norms, None, None, (), {}, ())  # type: ignore[arg-type]


def loss_deviations(target: Side, source: Numbers | None, resumed: Numbers, singles: list[Numbers]) -> list[Deviation]:
    """Against one process that resumed from the same checkpoint, and against the source where the precision is its.

    ``singles``: the plain run first, then the reordered ones.
    """
    model, dtype = target.config.model, target.config.precision.dtype
    if dtype == "fp64":
        wide: Tolerance = FP64
    else:
        wide = spread([_run(n) for n in singles], model, name=dtype, floor=FP32.scaled(0.5)).scaled(SPREAD_FACTOR)
    others = [singles[0], *([source] if source is not None else [])]
    out = [d for other in others for d in compare(_run(other), _run(resumed), wide, model)]
    if dtype == "fp32":  # the first step is taken from identical state
        out += [d for other in others for d in compare(_run(other[:1]), _run(resumed[:1]), FP32, model)]
    return out


def round_trip(ranks: RankPool, trip: RoundTrip, folder: Path) -> dict[str, Any]:
    """Run a pair; a line of the results file."""
    source, target, begun = trip.source, trip.target, time.monotonic()
    before, after = folder / f"{trip.seed}-before", folder / f"{trip.seed}-after"
    went_on = ranks.run(
        source.topology.world_size, train_and_save, source, before, deepspeed=source.deepspeed, timeout=180
    )[0]
    resumed = ranks.run(
        target.topology.world_size, resume, target, before, after, deepspeed=target.deepspeed, timeout=180
    )[0]
    dtype = target.config.precision.dtype
    plain = dataclasses.replace(
        target.config, engine="native", layout=LayoutConfig(vocab_padding_multiple=1, zero_stage=0),
        backend=dataclasses.replace(target.config.backend, optimizer="auto", own_kernels="off"),
    )
    reorderings = [None] if dtype == "fp64" else [None, *REORDERINGS]
    singles = ranks.run(1, reordered, plain, before, reorderings, timeout=180)[0]
    same = source.config.precision.dtype == dtype
    names = set(parameter_shapes(source.config.model))
    state = state_faults(before, after, names, same_precision=same)
    deviations = loss_deviations(target, went_on if same else None, resumed, singles)
    return {
        "part": "layouts", "seed": trip.seed, "from": str(source), "to": str(target),
        "state": state or "equal to the bit", "ok": not state and all(d.ok for d in deviations),
        "deviations": [
            {**dataclasses.asdict(d), "value": float(f"{d.value:.3g}"), "bound": float(f"{d.bound:.3g}")}
            for d in deviations
        ],
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> int:
    """Make the round trips of a range of seeds, append a line each to a file, skip those that are in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-29", help="first-last")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    done = {json.loads(line)["seed"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    until, bad, ranks = time.monotonic() + args.seconds, 0, RankPool()
    try:
        with tempfile.TemporaryDirectory(prefix="resharding-") as folder:
            for seed in range(int(first), int(last or first) + 1):
                if seed in done or time.monotonic() > until:
                    continue
                row = round_trip(ranks, draw(seed), Path(folder))
                bad += not row["ok"]
                print(f"seed {seed}: {'ok' if row['ok'] else 'BAD'} {row['from']} -> {row['to']}", flush=True)
                with args.out.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
    finally:
        ranks.close()
    return 1 if bad else 0


if __name__ == "__main__":
    # Ranks import this file by its name; run as a program it would be another module to them.
    import resharding

    sys.exit(resharding.main())
