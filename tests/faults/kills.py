"""SIGKILL of a random rank at a random moment, over and over: nothing committed is lost, and the losses stay the same.

``draw(seed)`` says whom and when. A *chain* is one run folder that is broken and started again until it is done; its
losses must be those of a run that nobody touched, to the bit, and so must its last checkpoint. Run many, resumably,
with ``python tests/faults/kills.py --seeds 0-99 --out FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import Command, Commands
from small_runs import Layout, Run, resumed_at, saved_steps, trajectory

LAYOUTS = (Layout(tp=2), Layout(pp=2, dp=2), Layout(dp=2), Layout(tp=2, pp=2))
EXPERTS = (Layout(dp=2, ep=2), Layout(tp=2, dp=2, ep=4), Layout(pp=2, dp=2, ep=2))
DOWN_S = 10.0
"""After a rank died everything must be down within this."""
START_S = 90.0
STEPS = 60
SETS = ("checkpoint.save_interval=2", "checkpoint.keep=3", "checkpoint.resume=auto")


@dataclass(frozen=True)
class Kill:
    """Whom, and when."""

    seed: int
    victim: int
    """Rank."""
    in_save: bool
    """Aim at a save; else at any moment, start-up included."""
    nth_save: int
    """Of this start, from 1."""
    fraction: float
    """Of a save's typical length, or of the time that a start and some saves take."""


def draw(seed: int, ranks: int) -> Kill:
    """Every run with the same seed gives the same."""
    r = random.Random(f"kill-{seed}")
    return Kill(seed, r.randrange(ranks), r.random() < 0.7, r.choice((1, 1, 2, 3)), r.random())


@dataclass
class KillResult:
    """What became of one kill; a line of the results file."""

    seed: int
    layout: str
    fault: str
    rank: int
    aimed_at_save: bool
    in_save: bool
    """step-N.tmp was there right before and right after the signal was sent."""
    moment_s: float
    """From the start of the command."""
    steps_seen: int
    """The last step in metrics.jsonl."""
    committed: int
    """The newest whole checkpoint when all was down; 0: none."""
    resumed: int = -1
    """Where the next start resumed; -1: not known yet."""
    down_s: float | None = None
    """From the signal until no process of the session was left."""
    exit_code: int = 0
    faults: tuple[str, ...] = ()
    """What was wrong; empty: nothing."""

    @property
    def ok(self) -> bool:
        """Nothing was wrong."""
        return not self.faults and self.resumed == self.committed


@dataclass(frozen=True)
class Reference:
    """The run that nobody touched, and how long its parts take."""

    rows: dict[int, tuple[Any, ...]]
    save_s: float
    whole_s: float
    """From the start of the command to its end."""
    start_s: float
    """To the first step's line."""
    run: Run


def reference(commands: Commands, home: Path, layout: Layout, steps: int) -> Reference:
    """Train without a fault."""
    run = Run(home, f"whole {layout}".replace(" ", "-"), layout, *SETS, steps=steps)
    begun = time.monotonic()
    command = commands.start(*run.command())
    since, lengths, first = 0.0, [], 0.0
    while command.poll() is None:
        now = time.monotonic()
        if run.saving():
            since = since or now
        elif since:
            lengths.append(now - since)
            since = 0.0
        if not first and (run.folder / "metrics.jsonl").exists() and run.steps_done():
            first = now - begun
        if now - begun > START_S + steps:
            break
        time.sleep(0.001)
    whole = time.monotonic() - begun
    assert command.wait(1.0) == 0, command.output()[-4000:]
    rows = trajectory(run.steps_done())
    assert list(rows) == list(range(1, steps + 1)), f"{len(rows)} of {steps} steps"
    return Reference(rows, statistics.median(lengths) if lengths else 0.05, whole, first, run)


class Chain:
    """One run folder, broken again and again."""

    def __init__(self, commands: Commands, home: Path, layout: Layout, whole: Reference, number: int, steps: int):
        self.commands, self.whole, self.steps = commands, whole, steps
        self.run = Run(home, f"broken-{layout}-{number}".replace(" ", "-"), layout, *SETS, steps=steps)
        self.pending: list[KillResult] = []
        self.since = 0.0
        self.complete = False

    def strike(self, kill: Kill) -> KillResult | None:
        """Start, kill, look. None: the run was done before the moment came, and has been checked to the end."""
        self.since = time.time()
        command = self.commands.start(*self.run.command())
        try:
            in_save = self._await(command, kill)
            ranks = command.ranks(self.run.layout.ranks)
            if in_save is None or command.poll() is not None or kill.victim >= len(ranks):
                self._finish(command)
                return None
            moment = time.monotonic() - command.started
            before = self.run.saving(self.since)
            os.kill(ranks[kill.victim], signal.SIGKILL)
            during = bool(before) and self.run.saving(self.since) == before
            down = command.all_down(DOWN_S + 5.0)
            if command.poll() == 0 and self.run.committed() == self.steps:
                self._finish(command)  # the rank had ended itself: a signal to a process that is not reaped is lost
                return None
            return self._judge(command, kill, in_save=during, moment=moment, down=down)
        finally:
            command.end()

    def _await(self, command: Command, kill: Kill) -> bool | None:
        """Wait for the moment; None: the command ended first."""
        saves, last = 0, 0
        moment = kill.fraction * (self.whole.start_s + 0.25 * (self.whole.whole_s - self.whole.start_s))
        while command.poll() is None:
            now = time.monotonic()
            if not kill.in_save:
                if now - command.started >= moment and len(command.ranks(99)) >= self.run.layout.ranks:
                    return False
            elif (step := self.run.saving(self.since)) and step != last:
                saves, last = saves + 1, step
                if saves == kill.nth_save:
                    time.sleep(kill.fraction * 0.9 * self.whole.save_s)
                    return True
            assert now - command.started < START_S, command.output()[-4000:]
            time.sleep(0.001)
        return None

    def _judge(self, command: Command, kill: Kill, *, in_save: bool, moment: float, down: float | None) -> KillResult:
        """Everything that can be seen before the next start."""
        faults = []
        if down is None:
            faults.append(f"processes {command.living()} lived {DOWN_S + 5:g} s after rank {kill.victim} was killed")
        elif down > DOWN_S:
            faults.append(f"{down:.1f} s until all was down")
        command.end()
        code, output = command.wait(5.0), command.output()
        if code == 0:
            faults.append("exit 0 although a rank was killed")
        if f"rank {kill.victim} was killed by SIGKILL" not in output:
            faults.append("the killed rank is not named")
        rows = self.run.steps_done()
        faults += [
            f"step {step}: {values}, unbroken {self.whole.rows[step]}"
            for step, values in trajectory(rows).items() if values != self.whole.rows[step]
        ][:3]
        committed = self.run.committed()
        said = max(saved_steps(output), default=0)
        if said > committed:
            faults.append(f"step {said} was reported as saved, and the newest whole checkpoint is of step {committed}")
        self._resolve(output)
        outcome = KillResult(
            seed=kill.seed, layout=str(self.run.layout), fault="SIGKILL", rank=kill.victim,
            aimed_at_save=kill.in_save, in_save=in_save, moment_s=round(moment, 3),
            steps_seen=max((row["step"] for row in rows), default=0), committed=committed,
            down_s=None if down is None else round(down, 3), exit_code=code, faults=tuple(faults),
        )
        self.pending.append(outcome)
        return outcome

    def _resolve(self, output: str) -> None:
        """The log of a start tells where those before it were resumed; one that was killed earlier tells nothing."""
        step = resumed_at(output)
        if step is not None:
            for outcome in self.pending:
                outcome.resumed = step
            self.pending.clear()

    def _finish(self, command: Command) -> None:
        """The run goes to its end, and all of it is the unbroken run."""
        code = command.wait(START_S + self.steps)
        output = command.output()
        assert code == 0, output[-4000:]
        self._resolve(output)
        ours = trajectory(self.run.steps_done())
        assert ours == self.whole.rows, [s for s in self.whole.rows if ours.get(s) != self.whole.rows[s]][:5]
        last = [str(r.checkpoints / f"step-{self.steps:08d}") for r in (self.run, self.whole.run)]
        code, output = self.commands.run("checkpoint", "diff", *last, "--kind", "all")
        assert code == 0 and re.search(r"^0 of \d+ tensors differ", output, re.M), output
        assert not list(self.run.checkpoints.glob("*.tmp")), "a leftover of a broken save stayed"
        self.complete = True

    def to_the_end(self) -> None:
        """Without further faults."""
        if not self.complete:
            command = self.commands.start(*self.run.command())
            try:
                self._finish(command)
            finally:
                command.end()


def strike_all(
    commands: Commands, home: Path, layout: Layout, seeds: Sequence[int], *, steps: int = STEPS,
    out: Path | None = None, until: float = float("inf"),
) -> list[KillResult]:
    """One kill for each seed; each is appended to ``out`` once the start after it has shown where it resumed."""
    whole = reference(commands, home, layout, steps)
    outcomes: list[KillResult] = []
    written = 0
    number, chain = 1, Chain(commands, home, layout, whole, 1, steps)
    for seed in seeds:
        if time.monotonic() > until:
            break
        kill = draw(seed, layout.ranks)
        while (outcome := chain.strike(kill)) is None:
            number += 1
            chain = Chain(commands, home, layout, whole, number, steps)
        outcomes.append(outcome)
        written = _write(outcomes, written, out)
    chain.to_the_end()
    _write(outcomes, written, out)
    return outcomes


def _write(outcomes: list[KillResult], written: int, out: Path | None) -> int:
    while written < len(outcomes) and outcomes[written].resumed >= 0:
        outcome = outcomes[written]
        if out is not None:
            with out.open("a") as stream:
                stream.write(json.dumps({**asdict(outcome), "ok": outcome.ok}) + "\n")
            print(f"seed {outcome.seed}: {'ok' if outcome.ok else f'BAD {outcome}'}", flush=True)
        written += 1
    return written


def main() -> int:
    """Kill for a range of seeds, append a line each to a file, skip those that are in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-99", help="first-last")
    parser.add_argument("--steps", type=int, default=STEPS, help="of one chain")
    parser.add_argument("--experts", action="store_true", help="models with experts, divided over ranks, instead")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    done = {json.loads(line)["seed"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    until = time.monotonic() + args.seconds
    bad, layouts = 0, EXPERTS if args.experts else LAYOUTS
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch, Commands(Path(scratch) / "logs") as commands:
        for index, layout in enumerate(layouts):
            todo = [s for s in seeds if s % len(layouts) == index and s not in done]
            if todo and time.monotonic() < until:
                home = Path(scratch) / str(index)
                outcomes = strike_all(commands, home, layout, todo, steps=args.steps, out=args.out, until=until)
                bad += sum(not outcome.ok for outcome in outcomes)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
