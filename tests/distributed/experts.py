"""Layers of experts train as on one process, on any layout: losses, every gradient by name, every route token by token,
exact counts, and the bias that balances them to the bit.

``draw(seed)`` is a pure function; the presets, and the sizes of ep that a layout allows, come in turn. Run many,
resumably, with ``python tests/distributed/experts.py --seeds 0-499 --out benchmarks/results/experts.jsonl``.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fuzz
import torch
from cases import _alone, make_batches, make_config, providers_of
from pool import RankPool

from megatron_port.config.schema import MoEConfig, RunConfig
from megatron_port.engine.native import NativeEngine
from megatron_port.model.router import Route, Router
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.topology import Topology
from megatron_port.parity.comparison import FP32, FP64, Deviation, Run, compare
from megatron_port.parity.run_record import RankTrace, record_run
from megatron_port.session.assemble import build_engine

STEPS = 3
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
Choice = tuple[int, int, int, int, tuple[int, ...]]
"""Step, layer, sample, position, and the experts that the token is sent to, dropped copies as -1 - expert."""


def legal_ep(t: Topology, experts: int) -> list[int]:
    """Sizes of ep that divide the experts and fit a layout."""
    cuts = (t.tp, t.tp * (t.shard or t.dp), t.tp * t.dp)
    stage = t.tp * t.dp
    return [e for e in range(1, stage + 1) if stage % e == 0 and experts % e == 0
            and all(cut % e == 0 or e % cut == 0 for cut in cuts)]


def draw(seed: int) -> fuzz.Draw:
    """A combination; presets in turn."""
    r = random.Random(f"experts-{seed}")
    name = list(PRESETS)[seed % len(PRESETS)]
    while True:
        t, batch = fuzz._sizes(r)
        if t.tp * t.dp > 1 or r.random() < 0.1:
            break
    model, layout = fuzz._model(r, t), fuzz._layout(r, t, "native")
    layout["recompute"] = r.choice(("none", "selective", "full"))
    stages = t.pp * layout["virtual_pipeline_size"]
    model["num_layers"] = max(stages + r.choice((0, 1, 2)), 2)
    if model["num_layers"] < len(model.get("attention_pattern", ())):
        del model["attention_pattern"]
    if model.get("sliding_window") == 1:  # equal tokens would have equal scores, whose order hangs on rounding
        model["sliding_window"] = 2
    experts = r.choice((8, 12, 12))
    moe: dict[str, Any] = {**PRESETS[name], "num_experts": experts, "ffn_hidden_size": r.choice((0, 8, 20)),
                           "drop_by": r.choice(("position", "probability")),
                           "shared_gate": name == "deepseek-v3" and r.random() < 0.3,
                           "router_bias": r.random() < 0.2}
    if moe.get("shared_ffn_hidden_size"):
        moe["shared_ffn_hidden_size"] = 8 * t.tp
    if name in ("qwen3", "mixtral") and r.random() < 0.3:
        moe["capacity_factor"] = 1.0
    shards = [n for n in range(1, t.dp) if t.dp % n == 0]
    if layout["zero_stage"] and shards and r.random() < 0.3:
        layout["shard_size"] = r.choice(shards)
        t = dataclasses.replace(t, shard=layout["shard_size"])
    t = dataclasses.replace(t, ep=r.choice(legal_ep(t, experts)[-3:]))
    layout["expert_parallel_size"] = t.ep
    dtype = r.choice(("fp64", "fp64", "fp32"))
    config = make_config(
        dtype=dtype, model={**model, "moe": MoEConfig(**moe)}, layout=layout, clip_grad=r.choice((0.0, 0.1, 0.5)),
        mask_loss=r.random() < 0.3, own_kernels=r.choice(("on", "off")),
        **{k: v for k, v in batch.items() if not k.startswith("rampup")},
        data={"attention_documents": r.choice(("across", "across", "within"))},
    )
    if config.layout.zero_stage == fuzz.before_stage_3(config.layout) and r.random() < 0.5:
        change: dict[str, Any] = {"zero_stage": 3, "reshard": r.choice(("forward", "step"))}
        config = dataclasses.replace(config, layout=dataclasses.replace(config.layout, **change))
    return fuzz.Draw(seed, dataclasses.replace(config, seed=r.randrange(1000)), t)


@dataclasses.dataclass
class ExpertTrace:
    """What one rank saw."""

    trace: RankTrace
    routes: list[Choice]
    tallies: list[dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor]


def run_rank(config: RunConfig, topology: Topology, steps: int = STEPS) -> ExpertTrace:
    """Train on this rank; the function that ranks are sent."""
    layout = config.layout
    ctx = ParallelContext.create(dataclasses.replace(
        topology, vp=layout.virtual_pipeline_size, folded=layout.pipeline_schedule == "zb-v",
        kv_copies=config.model.kv_heads_held(topology.tp) // config.model.kv_heads, shard=layout.shard_size,
    ), "cpu")
    try:
        engine = build_engine(config, ctx, providers_of(config))
        assert isinstance(engine, NativeEngine)
        routes: list[Choice] = []
        for module in engine.stage.modules():
            if isinstance(module, Router):
                module.register_forward_hook(lambda router, inputs, route: _record(routes, router, inputs[0], route))
        tallies = []
        step_of = engine.train_step

        def train_step(*args: Any, **kwargs: Any) -> Any:
            result = step_of(*args, **kwargs)
            tallies.append(dict(result.tallies))
            return result

        engine.train_step = train_step  # type: ignore[method-assign]
        trace = record_run(
            engine, ctx, make_batches(config, ctx), steps=steps, lr=lambda step: 1e-2, evaluate=True,
            evaluate_after=True, gradient_steps=steps if config.precision.dtype == "fp64" else 1,
        )
        return ExpertTrace(trace, routes, tallies, {r.name: b.clone() for r, b in engine.buffers})
    finally:
        ctx.close()


def _record(routes: list[Choice], router: Router, x: torch.Tensor, route: Route) -> None:
    """Keep a layer's choices for a micro-batch of a step, of its first forward pass."""
    context = router.stream.current
    if context is None or context.recomputing or not router.stream.enabled:
        return
    rows, batch, _ = x.shape
    positions = router.share.residual(router.share.seq_length(rows * router.share.pieces)).index(x.device)
    kept = torch.ones_like(route.experts, dtype=torch.bool) if route.kept is None else route.kept
    marked = torch.where(kept, route.experts, -1 - route.experts).view(rows, batch, -1).tolist()
    for position, by_sample in zip(positions.tolist(), marked):
        for sample, experts in zip(context.sample_ids, by_sample):
            routes.append((context.samples.step, router.index, sample, position, tuple(experts)))


def run_ranks(cases: Sequence[tuple[RunConfig, Topology]]) -> list[ExpertTrace]:
    """Several cases of one world size on this rank."""
    return [run_rank(*case) for case in cases]


def judge(one: fuzz.Draw, ranks: Sequence[ExpertTrace]) -> list[Deviation]:
    """Compare with one process. AssertionError: a route, a count or a buffer differs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reference = run_rank(_alone(one.config), Topology())
    finally:
        torch.set_num_threads(threads)
    expected, found = sorted(reference.routes), sorted(choice for rank in ranks for choice in rank.routes)
    assert len(expected) == len(set(expected)) and expected == found, f"seed {one.seed}: {_first(expected, found)}"
    for rank in ranks:
        for step, (mine, theirs) in enumerate(zip(reference.tallies, rank.tallies, strict=True)):
            for name, total in mine.items():
                same = torch.equal(total, theirs[name]) if total.dtype == torch.int64 else torch.allclose(
                    total, theirs[name], rtol=1e-9 if one.config.precision.dtype == "fp64" else 1e-4, atol=1e-7
                )
                assert same, f"seed {one.seed}: {name} of step {step} is {theirs[name]} and not {total}"
        for name, buffer in rank.buffers.items():
            assert torch.equal(buffer, reference.buffers[name]), f"seed {one.seed}: {name}"
    bounds = FP64 if one.config.precision.dtype == "fp64" else FP32
    return compare(
        Run.of([reference.trace]), Run.of([rank.trace for rank in ranks]), bounds, one.config.model
    )


def _first(expected: list[Choice], found: list[Choice]) -> str:
    lacking, other = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    return f"{len(lacking)} of {len(expected)} routes differ, {len(found)} found; {lacking[:2]}, and not {other[:2]}"


def run_draws(ranks: RankPool, draws: Sequence[fuzz.Draw]) -> list[tuple[fuzz.Draw, list[Deviation]]]:
    """Run draws, those of one world on the same ranks."""
    out = []
    for world in sorted({one.topology.world_size for one in draws}):
        members = [one for one in draws if one.topology.world_size == world]
        cases = [(one.config, one.topology) for one in members]
        results = ranks.run(world, run_ranks, cases, timeout=60.0 + 30.0 * len(cases)) if world > 1 else [
            run_ranks(cases)
        ]
        out += [(one, judge(one, [result[i] for result in results])) for i, one in enumerate(members)]
    return out


def main() -> int:
    """Run a range of seeds, append a line each to a file, skip those that are in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-499", type=fuzz._seeds)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draws = list(map(draw, args.seeds))
    return fuzz.run_resumable(draws, args.out, batch_size=16, seconds=args.seconds, run=run_draws)


if __name__ == "__main__":
    import experts  # ranks take functions of modules that they can import

    sys.exit(experts.main())
