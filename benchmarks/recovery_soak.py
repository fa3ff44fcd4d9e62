"""Compare a run struck by drawn faults with the same run without, to the bit: losses, norms, the last checkpoint.

    python benchmarks/recovery_soak.py [--steps N] [--every SECONDS] [--count N] [--seed N] [--set …]

The quick start's shape on eight ranks (tp 2 x pp 2 x dp 2), with copies of each step in memory, every tenth on the
disk as well, and a checkpoint every ten steps. ``megatron-port chaos`` kills and stops ranks and cuts connections while
it trains; then it trains once more undisturbed. Prints one JSON object; ends with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

COMPARED = ("loss", "grad_norm", "validation_loss")


def command(home: Path, name: str, args: argparse.Namespace) -> list[str]:
    """Return ``megatron-port``'s words for one of the two runs: the drill, or the undisturbed one."""
    (home / "disk").mkdir(exist_ok=True)
    sets = [f"name={name}", f"output_dir={home}/runs", "data.synthetic=true", "data.train=[]",
            f"training.steps={args.steps}", "training.log_interval=1", "training.eval_interval=50",
            "checkpoint.save_interval=10", "checkpoint.memory_interval=1", f"checkpoint.disk_folder={home}/disk",
            "checkpoint.disk_interval=10", "launch.when_lost=replace", "watch.hang_seconds=4", *args.set]
    verb = ["chaos", "runs/quickstart", "--every", str(args.every), "--count", str(args.count), "--seed",
            str(args.seed), "--json"] if name == "drill" else ["train", "runs/quickstart"]
    sets = [word for one in sets for word in ("--set", one)]
    return [sys.executable, "-m", "megatron_port", *verb, "--nproc", "8", *sets]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` as they were written."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files_of(folder: Path) -> dict[str, str]:
    """Return the digest of each tensor file of the newest checkpoint, by its path in there."""
    newest = max((path.parent for path in (folder / "checkpoints").glob("*/manifest.json")), key=lambda path: path.name)
    return {str(path.relative_to(newest)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(newest.rglob("*.safetensors"))}


def differences(struck: Path, calm: Path, steps: int) -> tuple[list[str], dict[str, int]]:
    """Return what differs, a line each, and the number of things compared by name."""
    wrong, compared = [], Counter[str]()
    both = [rows_of(folder) for folder in (struck, calm)]
    for name in COMPARED:
        ours, theirs = ([(row["step"], row[name]) for row in rows if name in row] for rows in both)
        compared[name] = len(theirs)
        if ours != theirs:
            first = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), "at the end")
            wrong.append(f"{name}: {len(ours)} rows, {len(theirs)} without faults; first difference {first}")
    if compared["loss"] != steps:
        wrong.append(f"{compared['loss']} losses of {steps} steps")
    files, others = files_of(struck), files_of(calm)
    compared["files"] = len(others)
    wrong += [f"{name} differs" for name in sorted(files.keys() | others.keys()) if files.get(name) != others.get(name)]
    return wrong, dict(compared)


def main() -> int:
    """Run both, and print what the drill says and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults, on average")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        drill = subprocess.run(command(home, "drill", args), stdout=subprocess.PIPE, text=True, check=False)
        calm = subprocess.run(command(home, "calm", args), stdout=subprocess.DEVNULL, check=False)
        if drill.returncode or calm.returncode:
            print(drill.stdout)
            print(f"exit codes: {drill.returncode} with faults, {calm.returncode} without", file=sys.stderr)
            return 1
        wrong, compared = differences(home / "runs" / "drill", home / "runs" / "calm", args.steps)
    told = json.loads(drill.stdout)
    faults = told.pop("faults")
    wrong += [] if faults else ["no fault struck: more steps, or less time between faults"]
    recovered = [fault["recovered_seconds"] for fault in faults if fault["recovered_seconds"] is not None]
    print(json.dumps({
        "what": f"benchmarks/recovery_soak.py {' '.join(sys.argv[1:])}", "load": [load, os.getloadavg()[0]],
        "differences": wrong, "compared": compared, **told, "kinds": Counter(fault["fault"] for fault in faults),
        "median_recovery": statistics.median(recovered) if recovered else None, "longest": max(recovered, default=None),
        "repeated": max((fault["repeated"] or 0 for fault in faults), default=0), "faults": faults}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
