"""Layers of experts train as on one process, on any layout: losses, every gradient by name, every route token by token,
exact counts, and the bias that balances them to the bit.

``draw(seed)`` is a pure function; the presets, and the sizes of ep that a layout allows, come in turn. Run many,
resumably, with ``python tests/distributed/experts.py --seeds 0-499 --out benchmarks/results/experts.jsonl``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drawing
import fuzz
import torch
from cases import Order, Reordering, _alone, make_batches, make_config, providers_of, release_deepspeed
from drawing_data import fed, scheduled
from pool import RankPool
from undecided import Choice, Follower, undecided

from megatron_port.core.config.schema import MoEConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.optim.schedules import learning_rate
from megatron_port.ext.experts.router import Route, Router
from megatron_port.run.build import build_engine
from megatron_port.tools.parity.comparison import FP32, FP64, Deviation, Run, compare
from megatron_port.tools.parity.emulation import ORDERS, apply_reduction_order
from megatron_port.tools.parity.run_record import RankTrace, record_run

STEPS = 3
DIVIDED = 1000
"""From this seed on context-parallel ranks divide the sequences."""
PRESETS: dict[str, dict[str, Any]] = {
    "switch": {"top_k": 1, "normalize": False, "every": 2, "jitter": 0.01, "capacity_factor": 1.25,
               "balance_loss": "sequence"},
    "gshard": {"top_k": 2, "every": 2, "second_expert": "random", "capacity_factor": 1.5, "balance_loss": "sequence"},
    "mixtral": {"top_k": 2, "balance_loss": "sequence", "z_weight": 0.001},
    "qwen3": {"top_k": 4, "balance_loss": "previous_step"},
    "deepseek-v3": {"top_k": 3, "first_dense": 1, "score": "sigmoid", "scale": 2.5, "groups": 4, "top_groups": 2,
                    "balance_bias": True, "balance_loss": "sequence", "balance_weight": 0.001,
                    "shared_ffn_hidden_size": 24},
}
"""Of what is published, with few experts (configs/moe)."""


@dataclasses.dataclass(frozen=True)
class ExpertDraw(drawing.Draw):
    """A combination with experts."""

    preset: str

    def describe(self) -> dict[str, object]:
        """For the results file."""
        moe = self.config.model.moe
        changed = {name: value for name, value in dataclasses.asdict(moe).items() if value != getattr(MoEConfig, name)}
        return {**super().describe(), "ep": self.topology.ep, "cp": self.topology.cp,
                "order": self.config.layout.cp_order, "preset": self.preset, "moe": changed}


def legal_ep(t: Topology, experts: int) -> list[int]:
    """Sizes of ep that divide the experts and fit a layout."""
    each = t.tp * t.cp
    cuts = (t.tp, each, each * (t.shard or t.dp), each * t.dp)
    stage = each * t.dp
    return [e for e in range(1, stage + 1) if stage % e == 0 and experts % e == 0
            and all(cut % e == 0 or e % cut == 0 for cut in cuts)]


def draw(seed: int) -> ExpertDraw:
    """A combination; presets in turn. Of every nine seeds one is of engine deepspeed, whose ranks have all experts."""
    r = random.Random(f"experts-{seed}")
    name = list(PRESETS)[seed % len(PRESETS)]
    while True:
        t, batch = drawing._sizes(r)
        if seed >= DIVIDED:
            t = dataclasses.replace(t, dp=max(t.dp // 2, 1), cp=r.choice((2, 2, 4)))
            batch = {"micro_batch_size": r.choice((1, 2)), "global_batch_size": 4 * t.dp}
            if t.world_size > 8:
                continue
        if t.tp * t.dp * t.cp > 1 or r.random() < 0.1:
            break
    engine = "deepspeed" if seed % 9 == 5 else "native"
    model, layout = drawing._model(r, t), drawing._layout(r, t, engine)
    if t.cp > 1:
        order = r.choice(("zigzag", "contiguous"))
        layout |= {"context_parallel_size": t.cp, "cp_order": order}
        model["seq_length"] = t.tp * t.cp * (2 if order == "zigzag" else 1) * r.choice((1, 2, 3))
    layout["recompute"] = r.choice(("none", "selective", "full"))
    stages = t.pp * layout.get("virtual_pipeline_size", 1)
    model["num_layers"] = max(stages + r.choice((0, 1, 2)), 2)
    if model["num_layers"] < len(model.get("attention_pattern", ())):
        del model["attention_pattern"]
    experts = r.choice((8, 12)) if (t.tp * t.cp * t.dp) % 3 else 12
    moe: dict[str, Any] = {**PRESETS[name], "num_experts": experts, "ffn_hidden_size": r.choice((0, 8, 20)),
                           "drop_by": r.choice(("position", "probability")),
                           "shared_gate": name == "deepseek-v3" and r.random() < 0.3,
                           "router_bias": r.random() < 0.2}
    further = random.Random(f"router-{seed}")  # apart, so that the other choices of a seed stay what they were
    if moe.get("groups"):
        moe |= {"group_score": further.choice(("max", "top2")), "bias_rate": further.choice((0.001, 0.01))}
    if moe.get("shared_ffn_hidden_size"):
        moe["shared_ffn_hidden_size"] = 8 * t.tp
    if name in ("qwen3", "mixtral") and r.random() < 0.3:
        moe["capacity_factor"] = 1.0
    shards = [n for n in range(1, t.dp) if t.dp % n == 0]
    if layout.get("zero_stage") and shards and r.random() < 0.3:
        layout["shard_size"] = r.choice(shards)
        t = dataclasses.replace(t, shard=layout["shard_size"])
    if engine == "native":
        t = dataclasses.replace(t, ep=r.choice(legal_ep(t, experts)[-2:]))
        layout["expert_parallel_size"] = t.ep
    dtype = r.choice(("fp64", "fp64", "fp32")) if engine == "native" else "fp32"
    config = make_config(
        engine=engine, dtype=dtype, model={**model, "moe": MoEConfig(**moe)}, layout=layout,
        clip_grad=r.choice((0.0, 0.1, 0.5)), mask_loss=r.random() < 0.3, own_kernels=r.choice(("on", "off")),
        **{k: v for k, v in batch.items() if not k.startswith("rampup")},
        data={"attention_documents": r.choice(("across", "across", "within"))},
    )
    if t.cp > 1 and config.model.attention_dropout:  # own attention drops probabilities of whole sequences
        config = dataclasses.replace(config, backend=dataclasses.replace(config.backend, attention="math"))
    before = drawing.before_stage_3(config.layout)
    if engine == "native" and config.layout.zero_stage == before and r.random() < 0.5:
        change: dict[str, Any] = {"zero_stage": 3, "reshard": r.choice(("forward", "step"))}
        config = dataclasses.replace(config, layout=dataclasses.replace(config.layout, **change))
    config = dataclasses.replace(
        config, seed=r.randrange(1000), checkpoint=dataclasses.replace(config.checkpoint, asynchronous=False)
    )
    config = drawing._offloaded(random.Random(f"offload-{seed}"), config)
    config = fed(random.Random(f"corpora-{seed}"), config)
    return ExpertDraw(seed, scheduled(random.Random(f"schedule-{seed}"), config, STEPS), t, name)


@dataclasses.dataclass
class ExpertTrace:
    """What one rank saw."""

    trace: RankTrace
    routes: list[Choice]
    tallies: list[dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor]


def run_rank(
    config: RunConfig, topology: Topology, steps: int = STEPS, order: Order = None, follower: Follower | None = None
) -> ExpertTrace:
    """Train on this rank; the function that ranks are sent. ``order``: of one process's sums."""
    layout = config.layout
    ctx = ParallelContext.create(dataclasses.replace(
        topology, vp=layout.virtual_pipeline_size, folded=layout.pipeline_schedule == "zb-v",
        kv_copies=config.model.kv_heads_held(topology.tp) // config.model.kv_heads, shard=layout.shard_size,
    ), "cpu")
    engine: Any = None
    try:
        engine = build_engine(config, ctx, providers_of(config))
        reordering = order if isinstance(order, Reordering) else None
        if reordering is not None:
            apply_reduction_order(engine.stage, reordering)
        if follower is not None:
            follower.attach(engine)
        routes: list[Choice] = []
        exact = config.precision.dtype == "fp64"
        for module in engine.stage.modules():
            if isinstance(module, Router):
                module.register_forward_hook(lambda router, inputs, route: _record(routes, router, inputs[0], route))
        tallies = []
        step_of = engine.train_step

        def train_step(*args: Any, **kwargs: Any) -> Any:
            result = step_of(*args, **kwargs)
            tallies.append(dict(result.tallies))
            return result

        engine.train_step = train_step
        trace = record_run(
            engine, ctx, make_batches(config, ctx, reordering), steps=steps, evaluate=True,
            lr=lambda step: learning_rate(config.optimizer, step, config.training.steps),
            # In fp32 weights differ by what Adam makes of rounding, and an evaluation has its own close choices.
            evaluate_after=exact, gradient_steps=steps if exact else 1,
        )
        return ExpertTrace(trace, routes, tallies, {r.name: b.clone() for r, b in engine.buffers})
    finally:
        ctx.close()
        if config.engine == "deepspeed":
            release_deepspeed(engine)
            del engine
            gc.collect()


def _record(routes: list[Choice], router: Router, x: torch.Tensor, route: Route) -> None:
    """Keep a layer's choices for a micro-batch of a step, of its first forward pass."""
    context = router.step.current
    if context is None or context.recomputing or not router.stream.enabled:
        return
    rows, batch, _ = x.shape
    positions = router.share.residual(router.share.seq_length(rows * router.share.pieces)).index(x.device)
    kept = torch.ones_like(route.experts, dtype=torch.bool) if route.kept is None else route.kept
    marked = torch.where(kept, route.experts, -1 - route.experts).view(rows, batch, -1).tolist()
    for position, by_sample in zip(positions.tolist(), marked):
        for sample, experts in zip(context.sample_ids, by_sample):
            routes.append((context.samples.step, router.index, sample, position, tuple(experts)))


def run_ranks(cases: Sequence[tuple[RunConfig, Topology]], steps: int) -> list[ExpertTrace]:
    """Several cases of one world size on this rank."""
    return [run_rank(*case, steps) for case in cases]


def judge(one: ExpertDraw, ranks: Sequence[ExpertTrace], steps: int) -> list[Deviation]:
    """Compare with one process: routes and exact counts too, and what balances experts, of which none may differ.

    In fp32 routes may where rounding decides (:mod:`undecided`); one process then follows those of the layout.
    """
    alone, out = _single(one, steps), []
    found = sorted(choice for rank in ranks for choice in rank.routes)
    where = "" if found == sorted(alone.routes) else _first(alone.routes, found)
    if where and one.config.precision.dtype == "fp32" and len(found) == len(alone.routes):
        followers = [Follower(found) for _ in ORDERS]
        alone, *_ = [_single(one, steps, order, follower) for order, follower in zip(ORDERS, followers, strict=True)]
        out, where = undecided(followers[0], followers[1:]), ""
    return [*out, Deviation("routes", where, float(bool(where)), 0.0), *_compared(one, alone, ranks)]


def _single(
    one: ExpertDraw, steps: int, order: Order = None, follower: Follower | None = None
) -> ExpertTrace:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_rank(_alone(one.config), Topology(), steps, order, follower)
    finally:
        torch.set_num_threads(threads)


def _compared(one: ExpertDraw, alone: ExpertTrace, ranks: Sequence[ExpertTrace]) -> list[Deviation]:
    """Counts, buffers, sums, losses and gradients."""
    exact = [
        (f"{name} of step {step}", torch.equal(total, rank.tallies[step][name]))
        for rank in ranks for step, totals in enumerate(alone.tallies)
        for name, total in totals.items() if total.dtype == torch.int64
    ]
    exact += [(name, torch.equal(b, alone.buffers[name])) for rank in ranks for name, b in rank.buffers.items()]
    differing = [name for name, same in exact if not same]
    narrow = one.config.precision.dtype != "fp64"
    sums = [
        (float(((rank.tallies[step][name] - total).abs() / total.abs().clamp(min=1.0)).max()), f"{name} of step {step}")
        for rank in ranks for step, totals in enumerate(alone.tallies)
        for name, total in totals.items() if total.dtype == torch.float64
    ]
    return [
        Deviation("counts", str(differing), len(differing), 0.0),
        Deviation("sums", max(sums)[1], max(sums)[0], 1e-3 if narrow else 1e-9),
        *compare(
            Run.of([alone.trace]), Run.of([rank.trace for rank in ranks]), FP32 if narrow else FP64, one.config.model,
            lr=0.0 if narrow else 1e-2,
        ),
    ]


def _first(expected: list[Choice], found: list[Choice]) -> str:
    lacking, other = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    return f"{len(lacking)} of {len(expected)} routes differ, {len(found)} found; {lacking[:2]}, and not {other[:2]}"


def run_draws(
    ranks: RankPool, draws: Sequence[ExpertDraw], steps: int = STEPS
) -> list[tuple[drawing.Draw, list[Deviation]]]:
    """Run draws, those of one world and engine on the same ranks."""
    out: list[tuple[drawing.Draw, list[Deviation]]] = []
    for world, deepspeed in sorted({(d.topology.world_size, d.config.engine == "deepspeed") for d in draws}):
        members = [
            d for d in draws if (d.topology.world_size, d.config.engine == "deepspeed") == (world, deepspeed)
        ]
        cases = [(d.config, d.topology) for d in members]
        results = [run_ranks(cases, steps)] if world == 1 else ranks.run(
            world, run_ranks, cases, steps, timeout=60.0 + 10.0 * steps * len(cases), deepspeed=deepspeed
        )
        out += [(d, judge(d, [result[i] for result in results], steps)) for i, d in enumerate(members)]
    return out


def main() -> int:
    """Run a range of seeds, append a line each to a file, skip those that are in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-499", type=fuzz.seed_range)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default=STEPS, type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draws = list(map(draw, args.seeds))
    run: Any = functools.partial(run_draws, steps=args.steps)
    return fuzz.run_resumable(draws, args.out, batch_size=16, seconds=args.seconds, run=run)


if __name__ == "__main__":
    import experts  # ranks take functions of modules that they can import

    sys.exit(experts.main())
