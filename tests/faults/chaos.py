"""Ten minutes of faults: a rank is killed, stopped for a while, or the run is told to leave, every 20 s on average.

Nobody helps: a loop starts the run again whenever it has ended. Goodput = useful steps x clean step time / wall time,
where useful steps are those of the newest whole checkpoint at the end (what was lost and done again counts once), and
the clean step time is the median over a run without faults, on the same machine, before and after. The losses of every
attempt must be those of one trajectory. ``python tests/faults/chaos.py --seconds 600 --out FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import Command, Commands
from small_runs import Layout, Run, trajectory

KINDS = ("SIGKILL", "SIGSTOP", "SIGUSR1")
STOPPED_S = (1.0, 6.0)
CLEAN_STEPS = 25


@dataclass(frozen=True)
class Fault:
    """One fault, ``at`` seconds from the beginning."""

    at: float
    kind: str
    victim: int
    """Rank; SIGUSR1 goes to the launcher, as a scheduler's does."""
    seconds: float
    """How long a stopped rank stays stopped."""


def draw(seed: int, *, seconds: float, mean: float, ranks: int) -> Iterator[Fault]:
    """Faults with exponential pauses; every run with the same seed gives the same."""
    r, at = random.Random(f"chaos-{seed}"), 0.0
    while True:
        at += r.expovariate(1.0 / mean)
        if at >= seconds:
            return
        yield Fault(at, r.choice(KINDS), r.randrange(ranks), r.uniform(*STOPPED_S))


def clean_step_seconds(commands: Commands, home: Path, layout: Layout, sets: tuple[str, ...], name: str) -> float:
    """Median seconds between the ends of steps of a run without faults and saves, the first ones left out."""
    run = Run(home, name, layout, *sets, "checkpoint.save_interval=0", "checkpoint.save_final=false", steps=CLEAN_STEPS)
    code, output = commands.run(*run.command(), seconds=600)
    assert code == 0, output[-3000:]
    times = [row["time"] for row in run.steps_done()]
    return statistics.median(b - a for a, b in zip(times[4:], times[5:]))


def strike(command: Command, fault: Fault, ranks: int) -> bool:
    """Do it; False if there was nobody to do it to."""
    found = command.ranks(ranks)
    if len(found) < ranks or command.poll() is not None:
        return False
    with suppress(ProcessLookupError):
        if fault.kind == "SIGKILL":
            os.kill(found[fault.victim], signal.SIGKILL)
        elif fault.kind == "SIGUSR1":
            os.kill(command.pid, signal.SIGUSR1)
        else:
            os.kill(found[fault.victim], signal.SIGSTOP)
            time.sleep(fault.seconds)
            os.kill(found[fault.victim], signal.SIGCONT)
        return True
    return False


def chaos(
    commands: Commands, home: Path, layout: Layout, sets: tuple[str, ...], *, seed: int, seconds: float, mean: float
) -> dict[str, Any]:
    """The chaos run; the line of the results file."""
    before = clean_step_seconds(commands, home, layout, sets, "clean-before")
    run = Run(home, "chaos", layout, *sets, steps=10**6)
    seen: dict[int, tuple[Any, ...]] = {}
    wrong: list[int] = []
    faults: list[dict[str, Any]] = []
    exits: list[int] = []
    begun = time.monotonic()
    pending = draw(seed, seconds=seconds, mean=mean, ranks=layout.ranks)
    fault = next(pending, None)
    command = commands.start(*run.command())

    def look() -> None:
        for step, values in trajectory(run.steps_done()).items():
            if seen.setdefault(step, values) != values:
                wrong.append(step)

    try:
        while (now := time.monotonic() - begun) < seconds:
            if command.poll() is not None:
                exits.append(command.wait(1))
                down = command.all_down(10.0)
                assert down is not None, f"{command.living()} were left behind"
                look()
                command = commands.start(*run.command())
            elif fault is not None and now >= fault.at:
                struck = strike(command, fault, layout.ranks)
                faults.append({
                    "at": round(now, 2), "kind": fault.kind, "rank": fault.victim, "struck": struck,
                    **({"stopped_s": round(fault.seconds, 2)} if fault.kind == "SIGSTOP" else {}),
                })
                fault = next(pending, None)
            time.sleep(0.01)
        wall = time.monotonic() - begun
        useful, look_last = run.committed(), max((row["step"] for row in run.steps_done()), default=0)
    finally:
        command.end()
    look()
    after = clean_step_seconds(commands, home, layout, sets, "clean-after")
    clean = (before + after) / 2
    return {
        "part": "chaos", "seed": seed, "layout": str(layout), "seconds": round(wall, 1),
        "mean_between_faults_s": mean, "faults": len(faults),
        **{kind: sum(f["kind"] == kind and f["struck"] for f in faults) for kind in KINDS},
        "starts": len(exits) + 1, "exit_codes": {str(c): exits.count(c) for c in sorted(set(exits))},
        "useful_steps": useful, "last_step": look_last, "clean_step_s": [round(before, 4), round(after, 4)],
        "goodput": round(useful * clean / wall, 4), "goodput_counting_the_uncommitted_tail": round(
            look_last * clean / wall, 4), "steps_whose_loss_changed": sorted(set(wrong)), "ok": not wrong,
        "events": faults,
    }


def main() -> int:
    """Run it once and append a line to a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--mean", type=float, default=20.0, help="seconds between faults, on average")
    parser.add_argument("--goodput", type=float, default=0.7, help="at least this")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--ep", type=int, default=0, help="a model with experts, divided over so many ranks")
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="as of train")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sets = (
        f"checkpoint.save_interval={args.save_interval}", "checkpoint.keep=2", "batch.micro_batch_size=4",
        "batch.global_batch_size=16", *args.sets,
    )
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, Commands(Path(folder) / "logs") as commands:
        row = chaos(
            commands, Path(folder) / "home", Layout(args.tp, args.pp, args.dp, args.ep), sets, seed=args.seed,
            seconds=args.seconds, mean=args.mean,
        )
    row["ok"] = row["ok"] and row["goodput"] >= args.goodput
    print(json.dumps({k: v for k, v in row.items() if k != "events"}, indent=1), flush=True)
    with args.out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
