"""Train, evaluate, save, resume, export and generate on the ghost machine; a resumable record with a line per run.

    make ghost-check       # or: python tests/ghost/check.py [--python ENV/bin/python] [--seconds 600] [--only 2x2x1]

The unmodified package runs under the CUDA build of torch with the real ProcessGroupNCCL. No number is computed
(computed.py does that); what is checked is that every run ends, that communicators meet in one order, that all ranks
ask for the same operations in an order in which they can run, that streams touch no memory in no order, and that every
launch is legal. A run trains two steps with an evaluation and a checkpoint, and then goes on from it (combinations.py).
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from analyse import faults
from combinations import Case, cases, further_cases
from machine import Ended, Machine, RankLog
from options import ROOT, chosen_torch, commit, machine, parser

RUN = """
name = "run"
engine = "native"
[model]
hidden_size = 64
num_attention_heads = 4
vocab_size = 500
seq_length = 32
[batch]
micro_batch_size = 1
[data]
synthetic = true
tokenizer = "byte"
[training]
steps = 2
eval_interval = 2
eval_batches = 1
[checkpoint]
save_interval = 2
[backend]
graphs = "off"
device = "cuda"
attention = "math"
[watch]
enabled = false
"""
OWN_KERNEL = "_ZN2mp"
"""How the mangled name of each of the project's kernels begins."""
STEP_FOLDER = "runs/run/checkpoints/step-00000002"


def own_launches(log: RankLog) -> int:
    """Launches of the project's kernels, whose names lie in its namespace."""
    return sum(e.kind == "kernel" and OWN_KERNEL in e.detail for e in log.events)


def what_follows(case: Case) -> list[str]:
    """Return the command after the training, without its settings."""
    ranks = ["--nproc", str(case.world)]
    return {
        "resume": ["train", "run.toml", *ranks, "--set", "training.steps=3"],
        "evaluate": ["evaluate", "runs/run", "--text", "run.toml", "--max-tokens", "64", *ranks],
        "generate": ["generate", "runs/run", "--prompt", "a", "--tokens", "2", *ranks],
        "export": ["checkpoint", "export", STEP_FOLDER, "exported", "--to", "dcp"],
    }[case.then]


def run_case(made: Machine, case: Case, limit_s: float) -> dict[str, Any]:
    """Run both commands, each in at most ``limit_s``; return the record's line."""
    began = time.monotonic()
    for name in ("runs", "exported", "state"):
        shutil.rmtree(made.scratch / name, ignore_errors=True)
    (made.scratch / "state").mkdir()
    (made.scratch / "run.toml").write_text(RUN)
    sets = [word for key, value in case.settings(str(made.scratch / "state")).items()
            for word in ("--set", f"{key}={value}")]
    ended: list[Ended] = []
    found: list[str] = []
    for argv in (["train", "run.toml", "--nproc", str(case.world)], what_follows(case)):
        settled = sets if argv[0] == "train" else sets_of_inference(sets) if argv[0] != "checkpoint" else []
        # Evaluation counts tokens, generation draws them, experts take their tokens by scores, and DeepSpeed decides
        # by what it reads from the device: all need numbers.
        needs_numbers = argv[0] in ("evaluate", "generate") or case.experts != "none" or case.engine != "native"
        how = made.compute if needs_numbers else made.run
        now = how(*argv, *settled, seconds=limit_s)
        ended.append(now)
        found += faults(now.logs, most_waits=case.most_waits)
        if now.code:
            found.append(f"exit {now.code} of {argv[0]}: {' | '.join(now.output.splitlines()[-3:])[:600]}")
        if argv[0] != "checkpoint" and len(now.logs) != case.world:
            found.append(f"{len(now.logs)} of {case.world} ranks of {argv[0]} launched a kernel")
        if found:
            break
    counts = [log.counts() for log in ended[0].logs]
    most = {name: max((count[kind] for count in counts), default=0) for name, kind in (
        ("communicators", "communicator begins"), ("kernels", "kernel"), ("nccl", "nccl"), ("waits", "wait"))}
    return {"case": case.name, "world": case.world, "ok": not found, "faults": found[:5], **most,
            "own_kernels": max((own_launches(log) for log in ended[0].logs), default=0),
            "cpu_s": round(sum(one.cpu_s for one in ended), 1), "seconds": round(time.monotonic() - began, 1)}


def sets_of_inference(sets: list[str]) -> list[str]:
    """Return the settings that a checkpoint's readers take: layout and kernels, without ZeRO and schedules."""
    wanted = ("layout.tensor", "layout.pipeline_parallel", "layout.data", "layout.sequence", "layout.context",
              "layout.expert", "backend.own")
    pairs = zip(sets[::2], sets[1::2])
    return [word for pair in pairs if pair[1].startswith(wanted) for word in pair]


def main() -> int:
    """Run the cases that the record lacks; 1 if one of them failed."""
    made = parser(__doc__)
    made.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ghost.jsonl")
    made.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this long")
    made.add_argument("--limit", type=float, default=120.0,
                      help="seconds for one command; a busy machine needs more than a deadlock is worth waiting for")
    made.add_argument("--count", type=int, default=320, help="cases of the native engine on whole sequences")
    made.add_argument("--only", default="", help="cases whose name contains this")
    a = made.parse_args()
    torch = chosen_torch(a.python)
    rows = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    done = {row["case"]: row["ok"] for row in rows}
    began, bad = time.monotonic(), 0
    with machine(torch) as node:
        for case in (*cases(a.count), *further_cases(name for name, good in done.items() if good)):
            if case.name in done or a.only not in case.name or time.monotonic() - began > a.seconds:
                continue
            row = run_case(node, case, a.limit) | {
                "commit": commit(), "torch": torch.version, "machine": platform.machine(), "command": "make ghost-check"
            }
            with open(a.out, "a") as out:
                out.write(json.dumps(row) + "\n")
            bad += not row["ok"]
            print(f"{'ok  ' if row['ok'] else 'BAD '} {case.name}  {row['cpu_s']} s of processor", *row["faults"],
                  sep="\n     ", flush=True)
    print(f"{bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
