"""Recorded steps on the ghost machine: a replay launches what the step launched, and the host does next to nothing.

    python tests/ghost/recorded.py --python ENV/bin/python [--only pp2]

Each case trains six steps with ``backend.graphs = "step"``: three without a recording, one that records, two that are
replayed. The fifth is compared with the third, which ran the same code call by call: the same kernels, products, copies
and collectives in the same order with the same sizes, and the same memory where it is not the allocator's. No call that
CUDA refuses in a capture, no work in a capture that escapes it, and no race between the streams of a replay.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from analyse import faults
from budgets import CASES as SIZES
from check import RUN
from machine import Event, Machine, RankLog
from options import HERE, chosen_torch, commit, machine, parser

from megatron_port.core.optim.rules import StepNumbers

WORK = ("kernel", "product", "fill", "copy", "nccl")


@dataclass(frozen=True)
class Case:
    """A layout, its schedule and ZeRO stage."""

    tp: int
    pp: int
    dp: int
    schedule: str
    vp: int
    zero: int
    dtype: str

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """``tp2pp2dp1-1f1b-vp1-zero1-bf16``."""
        return f"tp{self.tp}pp{self.pp}dp{self.dp}-{self.schedule}-vp{self.vp}-zero{self.zero}-{self.dtype}"

    @property
    def settings(self) -> dict[str, str]:
        """What it sets. Sequence parallelism is on wherever there is tensor parallelism."""
        return {
            "layout.tensor_parallel_size": str(self.tp), "layout.pipeline_parallel_size": str(self.pp),
            "layout.data_parallel_size": str(self.dp), "layout.pipeline_schedule": self.schedule,
            "layout.virtual_pipeline_size": str(self.vp), "layout.zero_stage": str(self.zero),
            "layout.sequence_parallel": str(self.tp > 1).lower(), "precision.dtype": self.dtype,
            "model.num_layers": "8", "batch.global_batch_size": str(4 * self.dp), "backend.own_kernels": "on",
        }


CASES = [
    Case(1, 1, 1, "1f1b", 1, 0, "bf16"), Case(1, 1, 1, "1f1b", 1, 0, "fp16"), Case(2, 1, 1, "1f1b", 1, 0, "bf16"),
    Case(1, 1, 2, "1f1b", 1, 1, "bf16"), Case(1, 1, 2, "1f1b", 1, 2, "bf16"), Case(1, 2, 1, "1f1b", 1, 0, "bf16"),
    Case(1, 2, 1, "1f1b", 2, 0, "fp32"), Case(1, 2, 1, "zb-h1", 1, 0, "bf16"), Case(1, 2, 1, "zb-v", 2, 0, "bf16"),
    Case(2, 2, 2, "1f1b", 1, 1, "bf16"),
]
STEPS, CALLED, REPLAYED = 6, 2, 4
MARK = f"pinned device {8 * (len(fields(StepNumbers)) + 1)}"
"""The copy of a step's numbers (``optim.rules``), with which it begins."""


def steps_of(log: RankLog) -> list[list[Event]]:
    """Return the calls of each step."""
    begins = [i for i, e in enumerate(log.events) if e.kind == "copy" and e.detail == MARK]
    return [log.events[a:b] for a, b in zip(begins, [*begins[1:], len(log.events)])]


def work(step: Sequence[Event]) -> list[Event]:
    """Return the calls of a step that give the device something to do."""
    return [e for e in step if e.kind in WORK]


def by_host(step: Sequence[Event]) -> list[Event]:
    """Return the calls of a step that the host makes itself: the launch of a graph is one."""
    out, inside = [], False
    for event in (event for event in step if event.kind != "mark"):
        if event.kind in ("graph begins", "graph ends"):
            inside = event.kind == "graph begins"
        if event.kind == "graph begins" or (not inside and event.kind != "graph ends"):
            out.append(event)
    return out


def capture_faults(log: RankLog) -> list[str]:
    """Return what a capture may not contain, and work between its beginning and end that it does not contain.

    Nor may it contain a copy from or to the host, whose memory is another's when the graph is replayed.
    """
    out, inside, replayed = [], False, False
    for event in log.events:
        if event.kind in ("graph begins", "graph ends"):
            replayed = event.kind == "graph begins"
        if replayed and event.kind == "copy" and event.detail.split()[:2] != ["device", "device"]:
            out.append(f"a replay copies memory of the host: {event.detail}")
        if event.kind == "capture":
            inside = event.detail.startswith("begins")
        elif event.kind == "capture fault":
            out.append(event.detail)
        elif inside and event.kind in (*WORK, "communicator begins"):
            out.append(f"{event.kind} {event.detail[:90]} on stream {event.stream} escapes the capture")
    return [f"rank {log.rank}: {one}" for one in dict.fromkeys(out)]


def replay_faults(log: RankLog) -> list[str]:
    """Return where a replayed step differs from the same step call by call."""
    steps = steps_of(log)
    if len(steps) < STEPS:
        return [f"rank {log.rank}: {len(steps)} steps in the log, not {STEPS}"]
    called, replayed = work(steps[CALLED]), work(steps[REPLAYED])
    for i, (one, other) in enumerate(zip(called, replayed)):
        if (one.kind, one.detail) != (other.kind, other.detail):
            return [f"rank {log.rank}: call {i} is {one.kind} {one.detail[:120]}, replayed {other.kind} "
                    f"{other.detail[:120]}"]
    if len(called) != len(replayed):
        return [f"rank {log.rank}: {len(called)} calls, {len(replayed)} replayed"]
    again = work(steps[REPLAYED + 1])
    moved = sum(a.memory != b.memory for a, b in zip(replayed, again) if a.detail != MARK and "pinned" not in a.detail)
    return [f"rank {log.rank}: {moved} calls of two replays touch other memory"] if moved else []


def same_addresses(log: RankLog) -> tuple[int, int]:
    """Return how many operands of the replayed step lie where they lay in the step call by call, and of how many."""
    steps = steps_of(log)
    pairs = [
        (a, b) for one, other in zip(work(steps[CALLED]), work(steps[REPLAYED]))
        for a, b in zip(one.memory.split(), other.memory.split())
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def run_case(made: Machine, case: Case, limit_s: float = 300.0) -> dict[str, Any]:
    """Train and compare; return the record's line."""
    (made.scratch / "run.toml").write_text(RUN)
    shutil.rmtree(made.scratch / "runs", ignore_errors=True)
    settings = case.settings | {
        "backend.graphs": "step", "training.steps": str(STEPS), "training.eval_interval": "0",
        "training.eval_batches": "0", "numerics.state_check_interval": "0", "telemetry.replica_check_interval": "0",
        "checkpoint.save_interval": "0", "checkpoint.save_final": "false",
    }
    arguments = [word for item in settings.items() for word in ("--set", "=".join(item))]
    code, output, logs = made.run("train", "run.toml", "--nproc", str(case.world), *arguments, seconds=limit_s)
    found = [f"exit {code}: {' | '.join(output.splitlines()[-3:])[:600]}"] if code else []
    found += [] if len(logs) == case.world else [f"{len(logs)} of {case.world} ranks launched a kernel"]
    row: dict[str, Any] = {"case": case.name}
    if not found:
        found += [fault for log in logs for fault in (*capture_faults(log), *replay_faults(log))]
        found += faults(logs, most_waits=None)  # while it records
    if not found:
        steps = steps_of(logs[0])
        same, operands = same_addresses(logs[0])
        row |= {
            "calls": len(by_host(steps[CALLED])), "calls_replayed": len(by_host(steps[REPLAYED])),
            "launches": len(work(steps[CALLED])), "operands": operands, "at_the_same_address": same,
            "kinds_replayed": dict(Counter(e.kind for e in by_host(steps[REPLAYED]))),
        }
    return row | {"ok": not found, "faults": found[:5]}


def run_size(made: Machine, name: str, limit_s: float = 300.0) -> dict[str, Any]:
    """Train a size of the comparison, whose operators take other ways than a small model's, with micro-batches on the
    GPU; return the record's line."""
    code, output, logs = made.start(str(HERE / "budget_step.py"), name, *map(str, SIZES[name]), "recorded",
                                    seconds=limit_s)
    found = [f"exit {code}: {' | '.join(output.splitlines()[-3:])[:600]}"] if code or len(logs) != 1 else []
    row: dict[str, Any] = {"case": name}
    if not found:
        found += [*capture_faults(logs[0]), *replay_faults(logs[0]), *faults(logs, most_waits=None)]
    if not found:
        steps, said = steps_of(logs[0]), json.loads(output.splitlines()[-1])
        row |= {"calls": len(by_host(steps[CALLED])), "calls_replayed": len(by_host(steps[REPLAYED])),
                "launches": len(work(steps[CALLED])), "python_calls_replayed": said["host_calls"]}
    return row | {"ok": not found, "faults": found[:5]}


def main() -> int:
    """Run the cases; 1 if one of them failed."""
    made = parser(__doc__)
    made.add_argument("--only", default="", help="cases whose name contains this")
    made.add_argument("--out", type=Path, help="file that gets a line for each case")
    a = made.parse_args()
    torch, bad = chosen_torch(a.python), 0
    with machine(torch) as node:
        cases = {case.name: case for case in CASES}
        for name in (name for name in (*cases, *SIZES) if a.only in name):
            row = run_case(node, cases[name]) if name in cases else run_size(node, name)
            row |= {"commit": commit(), "torch": torch.version, "command": "python tests/ghost/recorded.py"}
            if a.out:
                with open(a.out, "a") as out:
                    out.write(json.dumps(row) + "\n")
            bad += not row["ok"]
            print(json.dumps(row), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
