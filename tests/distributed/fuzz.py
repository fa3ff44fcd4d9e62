"""Random draws (drawing.py), each compared with one process, and their records.

Run many, resumably, with ``python tests/distributed/fuzz.py --seeds 0-999 --out FILE``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import records
from cases import Order, run_cases, single_run, within_rounding
from drawing import STEPS, Draw, draw
from pool import RankPool

from megatron_port.core.config.schema import ActivationsConfig, LayoutConfig, RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.optim.schedules import learning_rate
from megatron_port.ext.kernels.settings import MaskNeeds
from megatron_port.tools.parity.comparison import FP32, FP64, Deviation, Run, compare
from megatron_port.tools.parity.run_record import RankTrace


def plain(config: RunConfig) -> RunConfig:
    """The configuration without its layout and engine: one process.

    Nor, in fp32 and fp64, its own kernels: torch's ops are the reference for all. In half precision they stay. There
    the kernels round less often than torch's chains of ops, so the two differ by a bias that no reordering of
    either's sums shows (docs/parity.md).
    """
    half = config.precision.dtype in ("bf16", "fp16")
    backend = dataclasses.replace(config.backend, optimizer="auto")
    if not half:
        backend = dataclasses.replace(backend, own_kernels="off", attention="math")
    return dataclasses.replace(
        config, engine="native", layout=LayoutConfig(vocab_padding_multiple=1), activations=ActivationsConfig(),
        backend=backend,
    )


@functools.lru_cache(maxsize=256)
def reference_run(config: RunConfig, order: Order = None) -> Run:
    """The single-process run of a plain configuration."""
    return single_run(config, steps=STEPS, order=order)


def settled(one: Draw) -> Draw:
    """The draw with a loss scale at which the first step of one process does not overflow in fp16: that step's
    gradients are compared. Skipped steps: test_fp16.py."""
    while one.config.precision.dtype == "fp16" and reference_run(plain(one.config)).grad_norms[0] is None:
        precision = one.config.precision
        scale = precision.initial_loss_scale / 16
        precision = dataclasses.replace(
            precision, initial_loss_scale=scale, min_loss_scale=min(precision.min_loss_scale, scale)
        )
        one = dataclasses.replace(one, config=dataclasses.replace(one.config, precision=precision))
    return one


def judge(one: Draw, traces: Sequence[RankTrace]) -> list[Deviation]:
    """Compare with the single process: gradients by name, norms, losses, copies."""
    config, run = plain(one.config), Run.of(traces)
    dtype = config.precision.dtype
    if dtype in ("bf16", "fp16"):
        return within_rounding(one.config, one.topology, run, functools.partial(reference_run, config))
    exact = dtype == "fp64"
    rates = [learning_rate(config.optimizer, step, config.training.steps) for step in range(STEPS)]
    lr = max(rates) if exact else 0.0
    return compare(reference_run(config), run, FP64 if exact else FP32, config.model, lr=lr)


def run_draws(
    ranks: RankPool, draws: Sequence[Draw], *, patience: float = 30.0,
) -> list[tuple[Draw, list[Deviation]]]:
    """Run draws, those of one world and engine on the same ranks; ``patience``: seconds for each before it fails."""
    groups: dict[tuple[int, bool], list[Draw]] = {}
    for one in map(settled, draws):
        groups.setdefault((one.topology.world_size, one.config.engine == "deepspeed"), []).append(one)
    out = []
    for (world, deepspeed), members in sorted(groups.items()):
        results = ranks.run(
            world, run_cases, [m.case for m in members], timeout=60.0 + patience * len(members), deepspeed=deepspeed
        )
        for i, member in enumerate(members):
            out.append((member, judge(member, [result[i] for result in results])))
    return out


_PATIENT = functools.partial(run_draws, patience=300.0)
"""For records, which share their machine with other work."""


def failures(results: Sequence[tuple[Draw, list[Deviation]]]) -> str:
    """The failed draws with what differed; empty if none did."""
    lines = []
    for one, deviations in results:
        bad = [d for d in deviations if not d.ok]
        if bad:
            lines += [f"seed {one.seed}: {one.describe()}", *(f"  {d}" for d in bad)]
    return "\n".join(lines)


def seed_range(text: str) -> list[int]:
    """Return the seeds of ``FIRST-LAST`` or ``ONE``."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def run_resumable(
    draws: Sequence[Draw], out: Path, *, batch_size: int, seconds: float, again: bool = False,
    run: Callable[[RankPool, Sequence[Draw]], list[tuple[Draw, list[Deviation]]]] = _PATIENT,
) -> int:
    """Run the draws that ``out`` (JSON lines) lacks, a batch at a time; 0 if none failed.

    ``again``: also those that another commit made. Later rows of a seed count.
    """
    here = records.commit()
    rows = records.latest(out, "seed")
    done = {seed for seed, row in rows.items() if not again or row.get("commit") == here}
    todo = [one for one in draws if one.seed not in done]
    ranks, started, bad = RankPool(), time.monotonic(), 0
    try:
        while todo and time.monotonic() - started < seconds:
            batch, todo = todo[:batch_size], todo[batch_size:]
            results = run(ranks, batch)
            with out.open("a") as f:
                for one, deviations in sorted(results, key=lambda x: x[0].seed):
                    row = {**one.describe(), "ok": all(d.ok for d in deviations), "commit": here}
                    row["deviations"] = [
                        {**dataclasses.asdict(d), "value": float(f"{d.value:.3g}"), "bound": float(f"{d.bound:.3g}")}
                        for d in deviations
                    ]
                    f.write(json.dumps(row) + "\n")
            text = failures(results)
            bad += sum(not all(d.ok for d in deviations) for _, deviations in results)
            print(f"{len(draws) - len(todo)} of {len(draws)} done, {bad} bad", flush=True)
            if text:
                print(text, flush=True)
    finally:
        ranks.close()
    return 1 if bad else 0


def record_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a command that records a matrix, or draws of its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=seed_range, default=[], help="draws instead of the matrix, e.g. 0-99")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    return parser


def record(
    draws: Sequence[Draw], args: argparse.Namespace, order: str, kind: Callable[[RunConfig], str] = lambda config: "",
) -> int:
    """Run what a file lacks: of each kind on each layout and ZeRO stage one, then a second one, and so on.

    ``order`` seeds the shuffle: wherever the command is cut off, what it has seen is spread over all the rest.
    """
    done = set(records.latest(args.out, "seed"))
    shuffled = list(draws)
    random.Random(order).shuffle(shuffled)
    shuffled.sort(key=lambda one: one.seed not in done)
    count: Counter[tuple[Topology, int, str]] = Counter()
    turn = {}
    for one in shuffled:
        place = one.topology, one.config.layout.zero_stage, kind(one.config)
        turn[one.seed], count[place] = count[place], count[place] + 1
    first = [one.seed in done for one in shuffled if turn[one.seed] == 0]
    print(f"{sum(first)} of {len(first)} layouts are in {args.out}", flush=True)
    shuffled.sort(key=lambda one: turn[one.seed])
    return run_resumable(shuffled, args.out, batch_size=args.batch, seconds=args.seconds)


def main() -> int:
    """Run a range of seeds, append a line each to a file, skip those that are in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-999", type=seed_range)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    parser.add_argument("--again", action="store_true", help="also what another commit made")
    parser.add_argument("--zero-stage", type=int, help="only draws of this stage")
    parser.add_argument("--masked", action="store_true", help="only draws whose attention is more than causal")
    parser.add_argument("--adapted", action="store_true", help="only draws that train adapters")
    parser.add_argument("--further", action="store_true", help="only draws that predict further tokens")
    parser.add_argument("--normed", action="store_true", help="only draws in half precision of branches normed at "
                        "their end")
    parser.add_argument("--ruled", action="store_true", help="only draws with another optimizer rule than adamw")
    parser.add_argument("--divided", action="store_true", help="only draws with context parallelism")
    args = parser.parse_args()
    draws = [d for d in map(draw, args.seeds) if args.zero_stage in (None, d.config.layout.zero_stage)]
    draws = [d for d in draws if not args.masked or MaskNeeds.of(d.config).any]
    draws = [d for d in draws if not args.adapted or d.config.fine_tuning.enabled]
    draws = [d for d in draws if not args.further or d.config.model.mtp_layers]
    draws = [d for d in draws if not args.normed or (
        d.config.precision.dtype in ("bf16", "fp16") and d.config.model.norm_placement != "pre")]
    draws = [d for d in draws if not args.divided or d.topology.cp > 1]
    draws = [d for d in draws if not args.ruled or d.config.optimizer.name != "adamw"]
    return run_resumable(draws, args.out, batch_size=args.batch, seconds=args.seconds, again=args.again)


if __name__ == "__main__":
    sys.exit(main())
