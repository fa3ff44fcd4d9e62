"""Train, evaluate, save and resume on the ghost machine, on many layouts; a resumable record with a line per case.

    make ghost-check            # or: python tests/ghost/check.py [--python ENV/bin/python] [--seconds 600] [--only pp2]

The unmodified command line runs under the CUDA build of torch with the real ProcessGroupNCCL. No number is computed
(losses are 0); what is checked is that every case ends, that communicators meet in one order, that all ranks ask for
the same operations in an order in which they can run, and that every launch is legal.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from analyse import faults  # noqa: E402
from environment import NoCudaTorch, find_torch, make_environment  # noqa: E402
from libraries import build, build_kernels  # noqa: E402
from machine import Machine, RankLog  # noqa: E402

RUN = """
name = "{name}"
engine = "native"
[model]
num_layers = 8
hidden_size = 64
num_attention_heads = 4
vocab_size = 1000
seq_length = 32
[precision]
dtype = "{dtype}"
[batch]
micro_batch_size = 1
global_batch_size = {batch}
[data]
synthetic = true
tokenizer = "byte"
[training]
steps = 4
eval_interval = 2
eval_batches = 1
[checkpoint]
save_interval = 2
[backend]
device = "cuda"
attention = "math"
own_kernels = "{own}"
[watch]
enabled = false
[layout]
tensor_parallel_size = {tp}
pipeline_parallel_size = {pp}
data_parallel_size = {dp}
sequence_parallel = {sp}
pipeline_schedule = "{schedule}"
virtual_pipeline_size = {vp}
zero_stage = {zero}
"""

OWN_KERNEL = "_ZN2mp"
"""How the mangled name of each of the project's kernels begins."""


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

    def run_file(self, *, own_kernels: bool = False) -> str:
        """The run as TOML. Sequence parallelism is on wherever there is tensor parallelism."""
        values = asdict(self) | {"name": self.name, "batch": 4 * self.dp, "sp": str(self.tp > 1).lower(),
                                 "own": "on" if own_kernels else "off"}
        return RUN.format(**values)


def cases(most: int = 8) -> list[Case]:
    """Every legal combination on at most ``most`` GPUs, mixed, so that any beginning of the list covers much."""
    out = []
    schedules = (("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2))
    for tp, pp, dp, (schedule, vp), zero, dtype in product(
        (1, 2, 4), (1, 2, 4), (1, 2, 3), schedules, (0, 1, 2), ("bf16", "fp32")
    ):
        if tp * pp * dp > most or (pp == 1 and (schedule, vp) != ("1f1b", 1)):
            continue
        if (zero and dp == 1) or (zero == 2 and schedule.startswith("zb")):
            continue
        out.append(Case(tp, pp, dp, schedule, vp, zero, dtype))
    random.Random(0).shuffle(out)
    return out


def run_case(machine: Machine, case: Case, limit_s: float = 120.0) -> dict[str, Any]:
    """Train two steps, resume for two more, each in at most ``limit_s``; return the record's line."""
    began = time.monotonic()
    (machine.scratch / "run.toml").write_text(case.run_file(own_kernels=machine.kernels is not None))
    argv = ["train", "run.toml", "--nproc", str(case.world)]
    found: list[str] = []
    logs: list[list[RankLog]] = []
    for steps in ("2", "4"):
        code, output, now = machine.run(*argv, "--set", f"training.steps={steps}", seconds=limit_s)
        logs.append(now)
        found += faults(now) if case.world > 1 else []
        if code:
            found.append(f"exit {code} to step {steps}: {' | '.join(output.splitlines()[-3:])[:600]}")
        if code or len(now) != case.world:
            found += [] if len(now) == case.world else [f"{len(now)} of {case.world} ranks launched a kernel"]
            break
    counts = [log.counts() for log in logs[0]]
    return {
        "case": case.name, "world": case.world, "ok": not found, "faults": found[:5],
        "communicators": max((c["communicator begins"] for c in counts), default=0),
        "kernels": max((c["kernel"] for c in counts), default=0),
        "own_kernels": max((own_launches(log) for log in logs[0]), default=0),
        "nccl": max((c["nccl"] for c in counts), default=0),
        "waits": max((c["wait"] for c in counts), default=0), "seconds": round(time.monotonic() - began, 1),
    }


def own_launches(log: RankLog) -> int:
    """Launches of the project's kernels, whose names lie in its namespace."""
    return sum(e.kind == "kernel" and OWN_KERNEL in e.detail for e in log.events)


def main() -> int:
    """Run the cases that the record lacks; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, help="of an environment with the CUDA build of torch; none: one is made")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ghost.jsonl")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this long")
    parser.add_argument("--limit", type=float, default=120.0,
                        help="seconds for one command; a busy machine needs more than a deadlock is worth waiting for")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    a = parser.parse_args()
    try:
        torch = find_torch(a.python.absolute() if a.python else make_environment(ROOT))
    except NoCudaTorch as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    done = {json.loads(line)["case"] for line in a.out.read_text().splitlines()} if a.out.exists() else set()
    began, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(torch.python, Path(scratch) / "built", Path(scratch))
        build(torch.libraries, machine.built)
        if problem := build_kernels(ROOT, machine.built):
            print(f"without the project's kernels: {problem}")
        for case in cases():
            if case.name in done or a.only not in case.name or time.monotonic() - began > a.seconds:
                continue
            row = run_case(machine, case, a.limit) | {
                "commit": commit, "torch": torch.version, "machine": platform.machine(), "command": "make ghost-check"
            }
            with open(a.out, "a") as out:
                out.write(json.dumps(row) + "\n")
            bad += not row["ok"]
            print(f"{'ok  ' if row['ok'] else 'BAD '} {case.name}  {row['seconds']} s", *row["faults"], sep="\n     ")
    print(f"{bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
