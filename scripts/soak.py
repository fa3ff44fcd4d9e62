"""The long versions of tests/faults, each resumable: what is in its results file already is not done again.

``make soak`` runs all parts; ``ARGS='--part kills --seconds 600'`` one of them for a while. Results are lines of JSON
in benchmarks/results/soak-PART.jsonl (seed, fault, moment, outcome, seconds), each with what it was made with: commit
and its date, machine, command. The table at the end is made of those.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests" / "faults"
RESULTS = ROOT / "benchmarks" / "results"

Rows = list[dict[str, Any]]


def results_file(part: str) -> Path:
    """Where a part's lines are."""
    return RESULTS / f"soak-{part}.jsonl"


def read(part: str) -> Rows:
    """A part's lines; none before its first run."""
    path = results_file(part)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kills(rows: Rows) -> str:
    """100 SIGKILLs: where they fell, and what came of them."""
    inside = sum(r["in_save"] for r in rows)
    down = max((r["down_s"] for r in rows if r["down_s"] is not None), default=0.0)
    good = sum(r["ok"] for r in rows)
    return (f"{len(rows)} SIGKILLs, {inside} inside a save; {good} resumed from the last committed step with the "
            f"unbroken run's losses; all down after {down:.1f} s at most")


def resharding(rows: Rows) -> str:
    """30 pairs of layouts."""
    engines = Counter(f"{r['from'].split()[0]} to {r['to'].split()[0]}" for r in rows)
    worst = max((d["value"] / d["bound"] for r in rows for d in r["deviations"] if d["bound"]), default=0.0)
    told = ", ".join(f"{n} {name}" for name, n in sorted(engines.items()))
    equal = sum(r["state"] == "equal to the bit" for r in rows)
    return f"{len(rows)} pairs ({told}): {equal} equal to the bit, losses at {worst:.2f} of their bound at most"


def readers(rows: Rows) -> str:
    """10,000 damaged files."""
    batches = [r for r in rows if "inputs" in r]
    total, read_, refused = (sum(r[k] for r in batches) for k in ("inputs", "read", "refused"))
    longest = max((r["longest_s"] for r in batches), default=0.0)
    peak = max((r["peak_kib"] for r in batches), default=0)
    return (f"{total} inputs: {refused} refused, {read_} read, {sum(r['findings'] for r in batches)} findings; "
            f"at most {longest:.2f} s and {peak / 1024:.0f} MiB each")


def corruptions(rows: Rows) -> str:
    """300 damaged checkpoints."""
    kinds = Counter(r["kind"] for r in rows)
    told = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return f"{len(rows)} corruptions ({told}): {sum(r['ok'] for r in rows)} found, named and passed over"


def chaos(rows: Rows) -> str:
    """The chaos runs."""
    return "; ".join(
        f"{r['seconds']:.0f} s, {r['faults']} faults, {r['starts']} starts, goodput {r['goodput']:.2f}" for r in rows
    )


def corpus(rows: Rows) -> str:
    """The large corpora."""
    return "; ".join(
        f"{r['gigabytes']:g} GB: at most {max(r['grown'].values()) / 2**20:.0f} MiB of anonymous memory above the "
        f"program itself, first batch after {r['large']['training']['first_batch_s']:.2f} s" for r in rows
    )


def offload(rows: Rows) -> str:
    """30 SIGKILLs in the middle of a write of offloaded state."""
    chains, good = len({r["chain"] for r in rows}), sum(r["ok"] for r in rows)
    return (f"{len(rows)} SIGKILLs in the middle of a write of offloaded state, {chains} runs; {good} resumed from the "
            "last committed step and ended as the unbroken run, to the bit")


def resharding_experts(rows: Rows) -> str:
    """26 checkpoints between sizes of ep and engines."""
    kinds = len({r["from"] for r in rows} | {r["to"] for r in rows})
    equal = sum(r["state"] == "equal to the bit" for r in rows)
    worst = max((r["loss"] for r in rows if r["loss"] != "not compared"), default=0.0)
    return (f"{len(rows)} checkpoints between {kinds} ways to hold experts: {equal} arrived equal to the bit, and the "
            f"next loss in fp32 within {worst:.1e}")


def resharding_zero(rows: Rows) -> str:
    """30 checkpoints between ZeRO stages, shard sizes, offload and engines."""
    kinds = len({r["from"] for r in rows} | {r["to"] for r in rows})
    equal, steps = (sum(r[part] == "equal to the bit" for r in rows) for part in ("state", "steps"))
    compared = sum(r["steps"] != "not compared" for r in rows)
    return (f"{len(rows)} checkpoints between {kinds} ways to hold state: {equal} arrived equal to the bit, "
            f"and {steps} of {compared} went on as their source, to the bit")


PARTS: dict[str, tuple[str, list[str], Callable[[Rows], str]]] = {
    "kills": ("kills.py", ["--seeds", "0-99"], kills),
    "resharding": ("resharding.py", ["--seeds", "0-29"], resharding),
    "corruptions": ("corruption.py", ["--count", "300"], corruptions),
    "readers": ("readers.py", ["--count", "10000"], readers),
    "chaos": ("chaos.py", ["--seconds", "600", "--mean", "20"], chaos),
    "corpus": ("big_corpus.py", ["--gigabytes", "10"], corpus),
    "offload": ("offload_kills.py", ["--times", "30"], offload),
    "resharding-zero": ("resharding_zero.py", ["--times", "30"], resharding_zero),
    "resharding-experts": ("resharding_experts.py", ["--times", "26"], resharding_experts),
    "kills-experts": ("kills.py", ["--seeds", "0-29", "--experts"], kills),
    "chaos-experts": ("chaos.py", ["--seconds", "300", "--mean", "20", "--ep", "2"], chaos),
}
"""Name → (program in tests/faults, its arguments, the line of the table)."""
WHOLE = {
    "kills": 100, "resharding": 30, "corruptions": 300, "readers": 10_000, "chaos": 1, "corpus": 1, "offload": 30,
    "resharding-zero": 30, "resharding-experts": 26, "kills-experts": 30, "chaos-experts": 1,
}
"""What a part must have done to be complete."""


def done(part: str, rows: Rows) -> int:
    """How much of it is in the results."""
    return sum(r.get("inputs", 0) for r in rows) if part == "readers" else len(rows)


def machine() -> str:
    """Processor and cores; a GPU plays no part in these."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def made_with(command: list[str]) -> dict[str, str]:
    """Commit (``+``: files differ from it), its date, machine and command."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") + ("+" if changed else ""),
        "date": git("log", "-1", "--format=%cs"), "machine": machine(),
        "command": shlex.join(["python", *(part.replace(f"{ROOT}/", "") for part in command[1:])]),
    }


def mark(part: str, made: dict[str, str]) -> None:
    """Write into every new line what it was made with."""
    path, rows = results_file(part), read(part)
    if any("made" not in row for row in rows):
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps({**row, "made": row.get("made", made)}) + "\n" for row in rows))
        scratch.replace(path)


def run(part: str, seconds: float, extra: list[str]) -> int:
    """Run or resume one part. Return its exit code; 0 if it is done already."""
    program, arguments, _ = PARTS[part]
    if part in ("chaos", "chaos-experts", "corpus", "corruptions") and read(part) and not extra:
        return 0
    resumable = part.startswith(("kills", "resharding", "offload"))
    limit = ["--seconds", f"{seconds:g}"] if resumable and seconds != float("inf") else []
    RESULTS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(FAULTS / program), *arguments, *limit, "--out", str(results_file(part)), *extra]
    made = made_with(command)
    try:
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    finally:
        mark(part, made)


def table(parts: list[str]) -> int:
    """Print what the results files say; 1 if anything in them is bad, or not all was done."""
    bad = 0
    for part in parts:
        rows = read(part)
        failed = sum(not r["ok"] for r in rows)
        whole = done(part, rows) >= WHOLE[part]
        state = f"FAILED {failed}" if failed else "ok" if whole else "unfinished" if rows else "not run"
        print(f"{part:<18} {state:<10} {PARTS[part][2](rows) if rows else ''}")
        bad += failed + (not whole)
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one (repeatable)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a part that can be resumed; more later")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    args, extra = parser.parse_known_args()
    parts = args.part or list(PARTS)
    started = time.monotonic()
    codes = [] if args.table else [run(part, args.seconds, extra) for part in parts]
    if codes:
        print(f"\n{(time.monotonic() - started) / 60:.1f} min")
    return table(parts) or (1 if any(codes) else 0)


if __name__ == "__main__":
    raise SystemExit(main())
