"""Schedules run for real, with chunks that cost what they are told to: measured bubbles beside the simulator's.

    python benchmarks/pipeline_trace.py --out benchmarks/results/pipeline-schedules.json --svg docs/images/schedules.svg

Four gloo ranks run ``pipeline.runner`` and ``engine.native_passes`` as the native engine does. A chunk's forward, input
gradient and weight gradient each sleep (without the interpreter's lock: a machine with two cores runs four stages at
once that way), F = I = W. The bubble of a step is its span over the time that a stage works, less one. A pass costs
about a millisecond beside its sleep; ``--unit`` keeps that small. The machine must be otherwise idle.
``--trace`` writes what ui.perfetto.dev opens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.process import ProgressTracker
from megatron_port.core.engine.native_passes import BackwardTarget, PassWorker, Stages, StepWork
from megatron_port.core.io.files import write_text
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.pipeline.runner import Boundary, ScheduleRunner, StageLink
from megatron_port.core.pipeline.schedules import Action, Span, make_schedule
from megatron_port.tools.charts.page import Bar, colour, drawing, gantt, legend, standalone, text
from megatron_port.tools.plan.simulate import bubble_fraction, simulate, unit_cost

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
StageSpans = Sequence[Sequence[Span]]
"""The spans of each stage; times in seconds."""
KINDS = (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2))


def chrome_trace(runs: dict[str, StageSpans]) -> str:
    """JSON of the trace-event format, which ui.perfetto.dev and chrome://tracing open.

    ``runs``: name → spans; each run is a process, each stage a thread. Times start at the run's first pass.
    """
    events: list[dict[str, object]] = []
    for pid, (name, stages) in enumerate(runs.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        zero = min(span.start for spans in stages for span in spans)
        for stage, spans in enumerate(stages):
            name_of = {"name": f"stage {stage}"}
            events.append({"ph": "M", "pid": pid, "tid": stage, "name": "thread_name", "args": name_of})
            events += [
                {
                    "ph": "X", "pid": pid, "tid": stage, "name": str(span.action), "cat": NAMES[span.action.kind.value],
                    "ts": (span.start - zero) * 1e6, "dur": (span.end - span.start) * 1e6,
                    "args": {"micro_batch": span.action.micro_batch, "chunk": span.action.chunk},
                }
                for span in spans
            ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def picture(rows: Sequence[tuple[str, StageSpans]], *, width: int = 1100, each: float = 18) -> str:
    """An SVG of pipelines one below the other on one time axis; chunks after the first are paler.

    ``rows``: (title, spans).
    """
    longest = max(max(s.end for st in stages for s in st) - min(s.start for st in stages for s in st)
                  for _, stages in rows)
    fills = {kind: colour(i) for i, kind in enumerate(NAMES)}
    swatches, top = legend(5, 18, [(NAMES[kind], fill) for kind, fill in fills.items()], width)
    parts, top = [swatches], top + 14
    for title, stages in rows:
        parts.append(text(5, top + 13, title, kind="strong"))
        bars = [[Bar(s.start, s.end, fills[s.action.kind.value] if not s.action.chunk else
                     f"color-mix(in srgb, {fills[s.action.kind.value]} 60%, var(--paper))",
                     mark=str(s.action.micro_batch), kind="onheat") for s in st] for st in stages]
        parts += gantt(bars, left=5, top=top + 19, scale=(width - 10) / longest, each=each, span=longest,
                       first=min(s.start for st in stages for s in st))
        top += 19 + each * len(stages) + 10
    return standalone(drawing(width, top, parts, "schedules, simulated and measured"), themed=True)


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradients: WgradAccumulator, cost: float
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.gradients, ctx.cost = gradients, cost
        time.sleep(cost)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.cost)
        if ctx.gradients.deferred is None:
            time.sleep(ctx.cost)
        else:
            ctx.gradients.deferred.append(lambda: time.sleep(ctx.cost))
        return grad, None, None, None


class Chunk(nn.Module):
    """A chunk of the model that sleeps; a ``StageModule``."""

    def __init__(self, gradients: WgradAccumulator, cost: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.gradients, self.cost = gradients, cost

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleeping.apply(x.float().requires_grad_(), self.weight, self.gradients, self.cost)

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return logits.sum()


def steps_of(rank: int, args: argparse.Namespace, name: str, chunks: int) -> list[list[list[Span]]]:
    """The spans of all stages, for each repetition, on rank 0."""
    topology = Topology(pp=args.stages, vp=chunks, folded=name == "zb-v")
    ctx = ParallelContext.create(topology, "cpu")
    gradients = WgradAccumulator(lambda p: None, lambda p: p)  # nothing is added: the products only sleep
    mine = [Chunk(gradients, args.unit / chunks) for _ in range(chunks)]
    runner = ScheduleRunner(StageLink(ctx), ProgressTracker())
    boundary = Boundary.of({"hidden": ((1, 8), torch.float32)})
    runner.timed = True
    tokens = torch.zeros(1, 8)
    batches = [MicroBatch((i,), tokens=tokens, labels=tokens) for i in range(args.micro_batches)]
    schedule, out = make_schedule(name, args.stages, args.micro_batches, chunks), []
    for step in range(args.repeats + 1):
        passes = PassWorker(
            Stages(mine, ctx, StepSlot(DropoutStream(0, ctx.device)), ProgressTracker()),
            StepWork(micro_batches=batches, step=step), BackwardTarget(gradients, torch.ones(())),
        )
        dist.barrier()
        runner.run(schedule, passes, lambda m: boundary)
        everyone: list[Any] = [None] * args.stages
        dist.all_gather_object(everyone, [(s.action.kind.value, s.action.micro_batch, s.action.chunk, s.start, s.end)
                                          for s in runner.spans])
        kinds = {a.kind.value: a.kind for a in schedule.plans[0]}
        if step == 0:
            continue  # connections are made
        out.append([[Span(Action(kinds[k], m, c), a, b) for k, m, c, a, b in spans] for spans in everyone])
    ctx.close()
    return out


def bubble_of(stages: list[list[Span]], busy: float) -> float:
    """Span of a step over the time that each stage works, less one."""
    return (max(s.end for st in stages for s in st) - min(s.start for st in stages for s in st)) / busy - 1


def rank_main(rank: int, args: argparse.Namespace) -> None:
    """One stage."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=rank, world_size=args.stages)
    rows, pictures, runs = [], [], {}
    for name, chunks in [kind for kind in KINDS if args.only in ("", kind[0])]:
        measured = steps_of(rank, args, name, chunks)
        busy = args.micro_batches * 3 * args.unit
        bubbles = [bubble_of(step, busy) for step in measured]
        schedule = make_schedule(name, args.stages, args.micro_batches, chunks)
        predicted = bubble_fraction(schedule)
        title = f"{name}, {chunks} chunk{'s' if chunks > 1 else ''} a stage"
        ideal = simulate(schedule, unit_cost(args.unit / chunks, 2 * args.unit / chunks))
        middle = measured[bubbles.index(statistics.median_low(bubbles))]
        pictures += [(f"{title}: simulated, bubble {predicted:.1%}", ideal),
                     (f"{title}: measured, bubble {statistics.median_low(bubbles):.1%}", middle)]
        runs[title] = middle
        rows.append({
            "schedule": name, "chunks": chunks, "simulated": predicted, "measured": statistics.median(bubbles),
            "all": bubbles, "ratio": statistics.median(bubbles) / predicted,
        })
        if rank == 0:
            row = rows[-1]
            print(f"{title:28} bubble {predicted:7.2%} simulated, {row['measured']:7.2%} measured "
                  f"(ratio {row['ratio']:.3f})", flush=True)
    if rank == 0:
        result = {
            "command": " ".join(["python", *sys.argv]), "torch": torch.__version__,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "stages": args.stages, "micro_batches": args.micro_batches,
            "seconds_of_a_pass": args.unit, "rows": rows,
        }
        if args.out:
            write_text(args.out, json.dumps(result, indent=1) + "\n")
        if args.svg:
            write_text(args.svg, picture(pictures))
        if args.trace:
            write_text(args.trace, chrome_trace(runs))
    dist.destroy_process_group()


def main() -> int:
    """Run all schedules, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one schedule, by name")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.6, help="seconds of a stage's forward pass")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--port", type=int, default=29631)
    for option in ("--out", "--svg", "--trace"):
        parser.add_argument(option, type=Path)
    mp.spawn(rank_main, args=(parser.parse_args(),), nprocs=parser.parse_args().stages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
