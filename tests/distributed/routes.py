"""Layers of experts in half precision: what rounding may change of the routes, and nothing else.

A layout rounds where one process does not, and a router that reads an input of other bits may choose another expert. So
one process, which knows nothing of the layout, writes its routes (``telemetry.routes``), and the layout runs twice:

* free: at most 5 % of its tokens are sent elsewhere in the first step, and of those that no earlier layer has sent
  elsewhere in their sample, each one's margin is within rounding (:meth:`Choice.certified`);
* following those routes, from its own choice of which each token that differs has such a margin, while losses and
  gradients are within the bounds of half precision, as without experts. All runs that these bounds are measured with
  follow the same routes.

Run many, resumably, with ``python tests/distributed/routes.py --seeds 0-99 --out benchmarks/results/routes.jsonl``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawing
import experts
import fuzz
import torch
from cases import LR, Order, _alone, _in_fp32, make_batches, providers_of
from pool import RankPool

from megatron_port.core.config.model import RoutesConfig
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.rank import Fence
from megatron_port.core.engine.native import NativeEngine
from megatron_port.ext.experts.router import Route, Router
from megatron_port.ext.experts.torch_ops import Routed
from megatron_port.ext.telemetry.routes import RunRoutes
from megatron_port.run.build import build_engine
from megatron_port.tools.parity import emulation as half_precision
from megatron_port.tools.parity.comparison import ROUNDOFF, Deviation, Run
from megatron_port.tools.parity.emulation import (
    ORDERS,
    Reordering,
    RoundingEmulation,
    RoundingNoise,
    apply_reduction_order,
)
from megatron_port.tools.parity.run_record import RankTrace, record_run

STEPS = 2
MOST_FLIPPED = 0.05
Token = tuple[int, int, int]
"""Layer, sample, position."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a router made of a token in the first step, left to itself."""

    experts: tuple[int, ...]
    values: tuple[float, ...]
    """Logits, or for sigmoid scores these and the bias: what the largest of are chosen."""
    reach: tuple[float, ...]
    """Of each expert: sum of |x_i w_i|."""

    def certified(self, other: tuple[int, ...], model: ModelConfig, unit: float) -> bool:
        """Whether rounding of the router's input by ``2 unit`` relative explains the choice of ``other``.

        An expert's logit is off by at most 2 u sum |x_i w_i| then, so that two of them that change places were at most
        4 u sum |x_i w_i| apart; a sigmoid is four times flatter.
        """
        moe, slope = model.moe, 1.0 if model.moe.score == "softmax" else 0.25
        mine, theirs = set(self.experts), set(other)
        near = all(
            self.values[a] - self.values[b] <= 4 * unit * slope * max(self.reach[a], self.reach[b])
            for a in mine - theirs for b in theirs - mine
        )
        if near or moe.groups == 1:
            return near
        each = moe.num_experts // moe.groups
        best = [sorted(self.values[g * each : (g + 1) * each])[-2:] for g in range(moe.groups)]
        of_group = sorted((b[-1] if moe.group_score == "max" else sum(b) for b in best), reverse=True)
        gap = of_group[moe.top_groups - 1] - of_group[moe.top_groups]
        return gap <= 2 * 4 * unit * slope * max(self.reach)


@dataclasses.dataclass
class RoutedTrace:
    """What one rank saw."""

    trace: RankTrace
    own: dict[Token, Choice]
    taken: dict[Token, tuple[int, ...]]


class Watch:
    """Hooks on a rank's routers: their own choice, and the one that they took, in the first step."""

    def __init__(self, engine: NativeEngine) -> None:
        self.own: dict[Token, Choice] = {}
        self.taken: dict[Token, tuple[int, ...]] = {}
        for module in (m for chunk in engine.chunks for m in chunk.modules() if isinstance(m, Router)):
            module.register_forward_hook(self._after)
            module._routed = functools.partial(  # type: ignore[method-assign]
                self._chosen, module, module._routed
            )
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def _chosen(
        self, router: Router, choose: Callable[[torch.Tensor, torch.Tensor | None], Routed], logits: torch.Tensor,
        fixed: torch.Tensor | None,
    ) -> Routed:
        own = router.ops.route(logits.detach(), router.balance_bias, router.routing)
        self._last = own.experts, own.scores if router.balance_bias is None else own.scores + router.balance_bias
        return choose(logits, fixed)

    def _after(self, router: Router, inputs: tuple[torch.Tensor], route: Route) -> None:
        context, (x,) = router.step.current, inputs
        if context is None or context.recomputing or context.samples.step or not router.stream.enabled:
            return
        assert self._last is not None
        own, biased = self._last
        reach = x.detach().double().flatten(0, 1).abs() @ router.weight.detach().double().abs().t()
        values = biased.double().log() if router.moe.score == "softmax" else biased.double()
        rows = x.shape[0]
        positions = router.share.residual(router.share.seq_length(rows * router.share.pieces)).index(x.device).tolist()
        tokens = [(router.index, sample, position) for position in positions for sample in context.sample_ids]
        for i, token in enumerate(tokens):
            self.own[token] = Choice(*(tuple(t[i].tolist()) for t in (own, values, reach)))
            self.taken[token] = tuple(route.experts[i].tolist())


def run_rank(
    config: RunConfig, topology: Topology, folder: str, *, logs: bool = False, follows: bool = True,
    steps: int = STEPS, order: Order = None,
) -> RoutedTrace:
    """Train on this rank, writing routes to the folder or following those in it; the function that ranks are sent."""
    layout = config.layout
    ctx = ParallelContext.create(dataclasses.replace(
        topology, vp=layout.virtual_pipeline_size, folded=layout.pipeline_schedule == "zb-v",
        kv_copies=config.model.kv_heads_held(topology.tp) // config.model.kv_heads, shard=layout.shard_size,
    ), "cpu")
    try:
        engine = build_engine(config, ctx, providers_of(config))
        assert isinstance(engine, NativeEngine)
        if isinstance(order, Reordering):
            apply_reduction_order(engine.stage, order)
        elif order is not None:
            order.emulate_rounding(engine.stage)
        moe = RoutesConfig(routes="log" if logs else "none", replay=f"{folder}/run/routes" if follows else "")
        session: Any = SimpleNamespace(
            config=dataclasses.replace(
                config, output_dir=folder, name="run", moe=moe,
                training=dataclasses.replace(config.training, steps=steps),
            ),
            ctx=ctx, fence=Fence(), logger=SimpleNamespace(log_any=print), is_rank_zero=ctx.rank == 0,
            device=SimpleNamespace(is_gpu=False),
        )
        routes, watch, train_step = RunRoutes(session, ()), Watch(engine), engine.train_step
        routes.attach(engine, 0)

        def step(micro_batches: Sequence[MicroBatch], **more: Any) -> Any:
            routes.begin_step(more["step"], micro_batches)
            result = train_step(micro_batches, **more)
            routes.end_step()
            return result

        engine.train_step = step  # type: ignore[method-assign]
        batches = make_batches(config, ctx, order if isinstance(order, Reordering) else None)
        trace = record_run(engine, ctx, batches, steps=steps, lr=lambda step: LR)
        routes.close()
        return RoutedTrace(trace, watch.own, watch.taken)
    finally:
        ctx.close()


def run_ranks(cases: Sequence[tuple[RunConfig, Topology, str]]) -> list[tuple[RoutedTrace, RoutedTrace]]:
    """Several cases of one world size on this rank, each free and following."""
    return [(run_rank(*case, follows=False), run_rank(*case)) for case in cases]


def draw(seed: int) -> drawing.Draw:
    """A draw of ``experts.draw`` in half precision."""
    one = experts.draw(seed)
    precision = dataclasses.replace(one.config.precision, dtype="fp16" if seed % 3 == 2 else "bf16")
    return dataclasses.replace(one, config=dataclasses.replace(one.config, precision=precision))


def judge(one: drawing.Draw, folder: str, ranks: Sequence[tuple[RoutedTrace, RoutedTrace]]) -> list[Deviation]:
    """Compare a layout's two runs with the one whose routes are in the folder."""
    alone = functools.cache(lambda order: _single(_alone(one.config), folder, order=order))
    wide = _alone(_in_fp32(one.config))
    there = alone(RoundingEmulation.of(one.config, one.topology))
    out = _routes(one, alone(None), [free for free, _ in ranks], "free")
    out += _routes(one, alone(None), [following for _, following in ranks], "following")
    return out + half_precision.within_rounding(
        one.config, Run.of([following.trace for _, following in ranks]), half_precision.SingleRuns(
            rounding_there=Run.of([there.trace]),
            ordered=lambda count: [Run.of([alone(order).trace]) for order in ORDERS[:count]],
            plain=lambda: Run.of([alone(None).trace]),
            fp32=lambda: Run.of([_single(wide, folder, steps=1).trace]),
            noisy=lambda: [Run.of([_single(wide, folder, steps=1, order=noise).trace])
                           for noise in RoundingNoise.of(one.config.precision)],
        ),
    )


def _single(config: RunConfig, folder: str, **more: Any) -> RoutedTrace:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_rank(config, Topology(), folder, **more)
    finally:
        torch.set_num_threads(threads)


def _routes(one: drawing.Draw, reference: RoutedTrace, ranks: Sequence[RoutedTrace], name: str) -> list[Deviation]:
    """Return the share of tokens whose choice differs, and how many of those no rounding explains."""
    unit, own = ROUNDOFF[one.config.precision.dtype], {t: c for rank in ranks for t, c in rank.own.items()}
    assert own.keys() == reference.own.keys() and len(own) == sum(len(rank.own) for rank in ranks)
    followed = all(rank.taken[t] == reference.taken[t] for rank in ranks for t in rank.taken)
    flipped = [t for t in sorted(own) if own[t].experts != reference.own[t].experts]
    first = {sample: layer for layer, sample, _ in reversed(flipped)}  # of free runs: the layer that all else follows
    seen = flipped if name == "following" else [t for t in flipped if first[t[1]] == t[0]]
    bad = [t for t in seen if not reference.own[t].certified(own[t].experts, one.config.model, unit)]
    words = f"{len(flipped)} of {len(own)} tokens, {len(seen)} with a margin of their own"
    out = [
        Deviation("flipped", words, len(flipped) / len(own), MOST_FLIPPED, f"routes, {name}"),
        Deviation("no margin", f"{bad[:3]}", float(len(bad)), 0.0, f"routes, {name}"),
    ]
    if name == "following":
        out.append(Deviation("replayed", "every token of every layer", float(not followed), 0.0, "routes, following"))
    return out


def run_draws(ranks: RankPool, draws: Sequence[drawing.Draw]) -> list[tuple[drawing.Draw, list[Deviation]]]:
    """Run draws, those of one world on the same ranks."""
    out = []
    with tempfile.TemporaryDirectory(prefix="routes-") as folder:
        for world, members in _by_world(draws):
            cases = []
            for one in members:
                at = f"{folder}/{one.seed}"
                _single(_alone(one.config), at, logs=True, follows=False)
                cases.append((one.config, one.topology, at))
            found = ranks.run(world, run_ranks, cases, timeout=60.0 + 120.0 * len(cases)) if world > 1 else [
                run_ranks(cases)
            ]
            out += [(one, judge(one, case[2], [rank[i] for rank in found]))
                    for i, (one, case) in enumerate(zip(members, cases))]
    return out


def _by_world(draws: Sequence[drawing.Draw]) -> Iterator[tuple[int, list[drawing.Draw]]]:
    for world in sorted({one.topology.world_size for one in draws}):
        yield world, [one for one in draws if one.topology.world_size == world]


def main() -> int:
    """Run a range of seeds, append a line each to a file, skip those that are in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-99", type=fuzz.seed_range)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draws = [one for one in map(draw, args.seeds) if one.config.engine == "native"]
    draws.sort(key=lambda one: one.topology.world_size)  # the quickest first
    return fuzz.run_resumable(draws, args.out, batch_size=4, seconds=args.seconds, run=run_draws)


if __name__ == "__main__":
    import routes  # ranks take functions of modules that they can import

    sys.exit(routes.main())
