"""Step time of two trees, to show that a refactoring makes no step slower.

    python benchmarks/before_after.py --before TREE --after TREE --out FILE
    python benchmarks/before_after.py --before TREE --after TREE --count --out FILE     (exact on a busy machine, too)

Ranks of both trees stand ready at the same time, each group with its own package, and train a few steps in turn, so
that what else the machine does falls on both alike. A round gives two ratios, after to before: of the processor seconds
of all ranks, which leave out waiting for a core, and of wall time. Reported: the median over rounds with its 95 %
confidence interval (bootstrap of starts and of their rounds), and the ratio of the tenth percentiles, of rounds that
were disturbed least. Every second round starts with the other tree. Where a process's memory happens to lie makes it
some percent faster or slower for life, so the rounds are divided among several starts of the ranks. The same tree twice
shows what the method can resolve. ``--count`` counts instead what a step does: calls of Python functions, calls of C
functions from Python, and torch's operators, over all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WARM_UP = 3
"""Steps before the first round."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Case:
    """A run of ``engines.run_config`` with another engine, dtype or layout; dp takes the ranks that are left."""

    engine: str
    dtype: str
    tp: int
    pp: int
    dp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype} tp{self.tp}pp{self.pp}dp{self.dp}"


CASES = [
    Case("native", "fp32", 1, 1, 1), Case("native", "fp32", 1, 2, 2), Case("native", "fp32", 2, 1, 2),
    Case("native", "bf16", 2, 2, 1), Case("deepspeed", "fp32", 1, 2, 2),
]


# -- a rank, in the tree that PYTHONPATH names ------------------------------------------------------------------------


def counted(step: Callable[[], Any]) -> dict[str, int]:
    """Return the calls and operators of a step, which is run twice."""
    from torch.profiler import ProfilerActivity, profile

    calls = {"call": 0, "c_call": 0}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in calls:
            calls[event] += 1

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    operators = sum(entry.count for entry in profiled.key_averages() if "::" in entry.key)
    return {"python": calls["call"], "c": calls["c_call"], "operators": operators}


def rank_main(rank: int, port: int, case: Case) -> None:
    """Build the engine; then for each line on stdin train that many steps and answer with the seconds (0: counts)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.simplefilter("ignore")
    sys.path.pop(0)  # this script's folder: what follows is the tree's
    import engines
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.world_size)
    config = engines.run_config(case.engine, case.dtype)
    config = replace(config, layout=replace(
        config.layout, tensor_parallel_size=case.tp, pipeline_parallel_size=case.pp, data_parallel_size=case.dp,
        sequence_parallel=case.tp > 1,
    ))
    device = engines.choose_device("cpu")
    ctx = engines.ParallelContext.create(engines.topology_of(config), device.torch_device)
    providers = engines.choose_providers(
        config.backend, device, engines.DTYPES[case.dtype], engine=case.engine, attention_dropout=0.0
    )
    engine, data, step = engines.build_engine(config, ctx, providers), engines.batches(config, ctx), 0

    def train() -> float:
        nonlocal step
        step += 1
        return float(engine.train_step(data, step=step - 1, lr=1e-3).loss)

    for line in sys.stdin:
        dist.barrier()
        if int(line) == 0:
            answer: dict[str, float] = {**counted(train)}
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            losses = [train() for _ in range(int(line))]
            cpu = time.process_time() - cpu
            dist.barrier()
            answer = {"cpu": cpu, "wall": time.perf_counter() - wall, "loss": losses[-1]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    ctx.close()
    os._exit(0)  # DeepSpeed's threads would hold the process


# -- the two groups of ranks ------------------------------------------------------------------------------------------


class Ranks:
    """The ranks of a case in one tree."""

    def __init__(self, tree: Path, case: Case) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(port), case.name], cwd=tree, env=environment,
                text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
            for rank in range(case.world_size)
        ]

    def ask(self, count: int) -> list[dict[str, Any]]:
        """Train ``count`` steps, or count what a step does; each rank's answer."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"rank {rank} ended: run it alone with {process.args}")
            answers.append(json.loads(line))
        return answers

    def steps(self, count: int) -> dict[str, float]:
        """Train; the processor seconds of all ranks, the wall seconds of the slowest, the loss on rank 0."""
        answers = self.ask(count)
        return {"cpu": sum(a["cpu"] for a in answers), "wall": max(a["wall"] for a in answers),
                "loss": answers[0]["loss"]}

    def close(self) -> None:
        """End the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def both(before: Path, after: Path, case: Case) -> Iterator[dict[str, Ranks]]:
    """Ranks of both trees, warmed up."""
    ranks = {"before": Ranks(before, case), "after": Ranks(after, case)}
    try:
        for group in ranks.values():
            group.steps(WARM_UP)
        yield ranks
    finally:
        for group in ranks.values():
            group.close()


def interval(starts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of the ratios of all starts."""
    r = random.Random(0)

    def resampled() -> list[float]:
        return [ratio for start in r.choices(starts, k=len(starts)) for ratio in r.choices(start, k=len(start))]

    medians = sorted(statistics.median(resampled()) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def tenth(values: Sequence[float]) -> float:
    """Return the tenth percentile."""
    return sorted(values)[len(values) // 10]


def measure(
    before: Path, after: Path, case: Case, *, starts: int, rounds: int, steps: int, seconds: float
) -> dict[str, Any]:
    """Return the ratios of a case, at most ``seconds`` of rounds, divided among ``starts`` of its ranks."""
    taken: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    ends: list[int] = []
    for _ in range(starts):
        with both(before, after, case) as ranks:
            until = time.monotonic() + seconds / starts
            for number in range(max(rounds // starts, 1)):
                if number and time.monotonic() > until:
                    break
                for name in ("before", "after") if number % 2 == 0 else ("after", "before"):
                    taken[name].append(ranks[name].steps(steps))
        ends.append(len(taken["after"]))
    row: dict[str, Any] = {"case": case.name, "starts": starts, "rounds": len(taken["after"]), "steps": steps}
    for what in ("cpu", "wall"):
        pairs = [(b[what], a[what]) for b, a in zip(taken["before"], taken["after"])]
        ratios = [a / b for b, a in pairs]
        by_start = [ratios[first:end] for first, end in zip([0, *ends], ends)]
        low, high = interval(by_start)
        row[what] = {
            "ratio": round(statistics.median(ratios), 4), "low": round(low, 4), "high": round(high, 4),
            "least_disturbed": round(tenth([a for _, a in pairs]) / tenth([b for b, _ in pairs]), 4),
            "by_start": [round(statistics.median(start), 4) for start in by_start],
            "seconds_a_step": {n: round(statistics.median(t[what] for t in taken[n]) / steps, 5) for n in taken},
            "pairs": [[round(b, 4), round(a, 4)] for b, a in pairs],
        }
    row["losses_equal"] = [t["loss"] for t in taken["before"]] == [t["loss"] for t in taken["after"]]
    return row


def said(row: dict[str, Any], what: str) -> str:
    """Return a ratio of :func:`measure` with its interval, for people."""
    return "{} {ratio:.3f} [{low:.3f}, {high:.3f}] ({least_disturbed:.3f})".format(what, **row[what])


def count(before: Path, after: Path, case: Case) -> dict[str, Any]:
    """Return what a step of a case does in both trees."""
    with both(before, after, case) as ranks:
        answers = {name: group.ask(0) for name, group in ranks.items()}
    totals = {name: {what: sum(a[what] for a in found) for what in found[0]} for name, found in answers.items()}
    return {"case": case.name, **totals}


def main() -> int:
    """Measure each case, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout, with its kernels built")
    parser.add_argument("--after", type=Path, help="the other")
    parser.add_argument("--rounds", type=int, default=60, help="of all starts")
    parser.add_argument("--starts", type=int, default=4, help="times that the ranks are started")
    parser.add_argument("--steps", type=int, default=2, help="of each tree in a round")
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, for the rounds of a case")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--count", action="store_true", help="count calls and operators of a step instead")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, port, name = args.rank
        rank_main(int(rank), int(port), next(case for case in CASES if case.name == name))
        return 0
    rows = []
    for case in (case for case in CASES if args.only in case.name):
        trees = args.before.resolve(), args.after.resolve()
        if args.count:
            row = count(*trees, case)
            print(f"{row['case']}: before {row['before']}, after {row['after']}", flush=True)
        else:
            row = measure(*trees, case, starts=args.starts, rounds=args.rounds, steps=args.steps, seconds=args.seconds)
            print(f"{row['case']}: after / before {said(row, 'cpu')}, {said(row, 'wall')} in {row['rounds']} rounds "
                  f"of {args.starts} starts; losses equal: {row['losses_equal']}", flush=True)
        rows.append(row)
        if args.out:
            commits = {n: commit(tree) for n, tree in (("before", args.before), ("after", args.after))}
            args.out.write_text(json.dumps({"commits": commits, "note": args.note, "cores": os.cpu_count(),
                                            "cases": rows}, indent=1) + "\n")
    return 0


def commit(tree: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
