"""A month of failures on 384 nodes of 8 ranks, event by event: jobs queued again beside recovery inside the job.

``python benchmarks/recovery_simulation.py [--runs 200] [--days 30] [--seed 1] [--out FILE]`` draws the device and the
moment of each failure, and plays steps, checkpoints, copies of the state and their way to the next node, recoveries,
spares, and the ends of jobs, one after the other. It shares no code with the planner's closed forms
(``tools/plan/failures.py``), which ``tests/unit/test_plan_failures.py`` compares with it.

Failures: 419 in 54 days on 16,384 devices (Llama 3, arXiv 2407.21783, table 5), of which 98 were software, switches and
cables, timeouts of NCCL and dependencies, after which the same nodes serve. 150 s to recover: FlashRecovery (arXiv
2509.03047), 4,800 devices. The seconds of a step, of a copy and of its way are the plan's of runs/frontier-1t. Of
queued jobs only the time in which they hold nodes counts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HOUR = 3600.0
RECOVER = 150.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run and what befalls it; seconds unless told otherwise."""

    nodes: int = 384
    ranks: int = 8
    """Per node."""
    device_hours: float = 16384 * 54 * 24 / 419
    """Between failures."""
    node_share: float = (419 - 98) / 419
    """Share of the failures that take a node."""
    pair_share: float = 0.0
    """Share of the lost nodes whose successor is lost with it."""
    step: float = 823.75
    """Without copies."""
    checkpoint_steps: int = 4
    checkpoint: float = 0.22
    """For which one stops the steps."""
    start: float = 600.0
    wall: float = 12 * HOUR
    recover: float = 0.0
    """From a failure to the next step inside the job; 0: each failure ends the job."""
    copy_steps: int = 1
    copy: float = 0.46
    """For which one stops the steps."""
    sent: float = 0.45
    """From then until the next node has it."""
    spares: int = 0
    replica_nodes: int = 0
    """Nodes of the replica that is given up where no spare is left; 0: then the job ends."""


class Failed(Exception):
    """A device failed before what was being done was over."""


class Simulation:
    """One run: a clock of the time for which nodes are held, steps done and saved, and who holds which copies."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.random = scenario, random.Random(seed)
        self.clock, self.next_failure = 0.0, 0.0
        self.done = self.saved = self.spares = 0
        self.failures = self.jobs = self.from_checkpoint = 0
        self.copies: list[tuple[int, float]] = []
        """Steps in a copy, and the moment from which the next node has it; two at most."""
        self.single: set[int] = set()
        """Nodes whose state is on one node only."""
        self.in_use = scenario.nodes

    @property
    def goodput(self) -> float:
        """Seconds of steps without copies that are not lost, of the time for which nodes were held."""
        return self.done * self.scenario.step / self.clock

    def play(self, until: float) -> Simulation:
        """Play jobs until the clock is there."""
        while self.clock < until:
            self.jobs += 1
            self._job(until)
        return self

    def _use(self, nodes: int) -> None:
        self.in_use = nodes
        between = self.scenario.device_hours * HOUR / (nodes * self.scenario.ranks)
        self.next_failure = self.clock + self.random.expovariate(1 / between)

    def _spend(self, seconds: float) -> None:
        if self.clock + seconds <= self.next_failure:
            self.clock += seconds
            return
        self.clock = self.next_failure
        self.failures += 1
        self._use(self.in_use)
        raise Failed

    def _job(self, until: float) -> None:
        """From a start to the save at the end of the wall time, a failure that ends the job, or the end of all."""
        scenario, end, recovers = self.scenario, self.clock + self.scenario.wall, False
        self.copies, self.single, self.spares = [], set(), scenario.spares
        self._use(scenario.nodes)
        try:
            self._spend(scenario.start)
        except Failed:
            return
        while self.clock < until:
            try:
                if recovers:
                    self._spend(scenario.recover)
                    if self.single:  # what lost nodes lacked was written to the shared file system
                        self.saved = self.done
                    recovers = False
                    self.single.clear()
                pace = scenario.step * scenario.nodes / self.in_use
                if self.clock + pace + scenario.copy + 2 * scenario.checkpoint > end:
                    self._spend(scenario.checkpoint)
                    self.saved = self.done
                    return
                self._step(pace)
            except Failed:
                if not scenario.recover or not self._survives():
                    self.done = self.saved
                    return
                recovers = True

    def _step(self, seconds: float) -> None:
        scenario = self.scenario
        self._spend(seconds)
        self.done += 1
        if scenario.recover and self.done % scenario.copy_steps == 0:
            self._spend(scenario.copy)
            self.copies = [*self.copies[-1:], (self.done, self.clock + scenario.sent)]
        if self.done % scenario.checkpoint_steps == 0:
            self._spend(scenario.checkpoint)
            self.saved = self.done

    def _survives(self) -> bool:
        """Go back to the newest state that is left after a failure; False: the job ends."""
        scenario = self.scenario
        self.copies = [copy for copy in self.copies if copy[1] <= self.clock]
        if self.random.random() < scenario.node_share:
            node = self.random.randrange(scenario.nodes * scenario.ranks) // scenario.ranks
            before, after = (node - 1) % scenario.nodes, (node + 1) % scenario.nodes
            lost = {node, after} if self.random.random() < scenario.pair_share else {node}
            if len(lost) == 2 or {before, after} & self.single:
                self.copies = []
                self.from_checkpoint += 1
            self.single |= lost
            self.spares -= len(lost)
            while self.spares < 0:
                if not scenario.replica_nodes or self.in_use <= scenario.replica_nodes:
                    return False
                self.spares += scenario.replica_nodes
                self._use(self.in_use - scenario.replica_nodes)
        self.done = max([self.saved, *(steps for steps, _ in self.copies)])
        return True


def simulate(scenario: Scenario, runs: int, days: float, seed: int = 1) -> list[Simulation]:
    """Play so many runs, each with a seed of its own."""
    return [Simulation(scenario, seed * 1_000_003 + i).play(days * 24 * HOUR) for i in range(runs)]


def figures(found: Sequence[Simulation]) -> dict[str, float]:
    """Mean goodput with its standard error, and what happened in a run on average."""
    shares = [run.goodput for run in found]
    return {
        "goodput": statistics.fmean(shares), "error": statistics.stdev(shares) / math.sqrt(len(shares)),
        "failures": statistics.fmean(run.failures for run in found),
        "jobs": statistics.fmean(run.jobs for run in found),
        "from_checkpoint": statistics.fmean(run.from_checkpoint for run in found),
    }


def planned(scenario: Scenario) -> float:
    """Goodput by the planner's closed form, for the record."""
    from megatron_port.tools.plan.failures import Pace, Recovery, queued_again, recovered

    pace = Pace(
        interval_s=scenario.checkpoint_steps * scenario.step, checkpoint_s=scenario.checkpoint,
        restart_s=scenario.start, between_s=scenario.device_hours * HOUR / (scenario.nodes * scenario.ranks),
        most_s=scenario.wall - scenario.start - scenario.checkpoint,
    )
    if not scenario.recover:
        return queued_again(pace).goodput
    copies = scenario.copy / scenario.copy_steps
    return recovered(pace, Recovery(
        nodes=scenario.nodes, copy_s=scenario.copy_steps * (scenario.step + copies), late_s=scenario.sent,
        slower=copies / scenario.step, recover_s=scenario.recover, spares=scenario.spares,
        node_share=scenario.node_share, pair_share=scenario.pair_share, replica_nodes=scenario.replica_nodes,
    )).goodput


def scenarios() -> dict[str, Scenario]:
    """What is recorded: runs/frontier-1t and a run of short steps, at the published rate and at four times that."""
    out: dict[str, Scenario] = {}
    long = Scenario()
    short = Scenario(step=30.0, checkpoint_steps=120, checkpoint=5.0, copy=0.3, sent=0.5)
    for name, scenario in (
        ("steps of 824 s, checkpoint every step", replace(long, checkpoint_steps=1)),
        ("steps of 824 s, checkpoint every 55 minutes", long),
        ("steps of 30 s, checkpoint every hour", short),
        ("steps of 824 s, checkpoint every 55 minutes, four times the rate", replace(
            long, device_hours=long.device_hours / 4)),
        ("steps of 30 s, checkpoint every hour, four times the rate", replace(
            short, device_hours=short.device_hours / 4)),
    ):
        within = replace(scenario, recover=RECOVER)
        out[f"{name}: queued again"] = scenario
        for spares in (0, 1, 2, 4, 8):
            out[f"{name}: recovered, spares {spares}"] = replace(within, spares=spares)
        out[f"{name}: recovered, spares 1, elastic"] = replace(within, spares=1, replica_nodes=64)
        out[f"{name}: recovered, spares 4, one of ten lost nodes takes its successor"] = replace(
            within, spares=4, pair_share=0.1)
    return out


def main() -> None:
    """Play all scenarios, print a line of each, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name, scenario in scenarios().items():
        found = figures(simulate(scenario, args.runs, args.days, args.seed))
        row = {key: round(value, 6) for key, value in found.items()}
        rows.append({"name": name, **row, "planned": round(planned(scenario), 6), "scenario": asdict(scenario)})
        print(f"{row['goodput']:8.4f} +- {row['error']:.4f}  planned {planned(scenario):.4f}  {name}", flush=True)
    if args.out:
        command = f"python benchmarks/recovery_simulation.py --runs {args.runs} --days {args.days:g} --seed {args.seed}"
        text = ",\n ".join(json.dumps(row) for row in rows)
        args.out.write_text(f'{{"command": "{command}", "rows": [\n {text}\n]}}\n')


if __name__ == "__main__":
    main()
