"""Recorded steps against the same steps call by call: the same bits, then what a step takes.

    python -m benchmarks.compare.recorded --size gpt2-xl --layers 12 --global-batch 16 --out recorded.json

Both train from the same weights in a process of their own. Six steps each, the last three of them replays: losses and
gradient norms must be equal to the bit, and so must hashes of all masters and moments. Then windows of steps in turn.
The file is written after each of these.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.compare.child import Child, ends_at
from benchmarks.compare.clocks import ClockLog, clock_log
from benchmarks.compare.results import hardware, write
from benchmarks.compare.sizes import sizes

PEERS = ("ours", "ours-recorded")
STEPS = 6
"""A step is replayed from the fourth on."""


def differences(made: dict[str, Any]) -> list[str]:
    """Return what differs between the two peers' numbers and state, for people; nothing where all bits are equal."""
    called, replayed = (made["peers"][name] for name in PEERS)
    out = []
    for kind in ("losses", "grad_norms", "digest"):
        pairs = list(zip(called[kind], replayed[kind], strict=True))
        off = [i for i, (a, b) in enumerate(pairs) if a != b]
        if off:
            out.append(f"{kind}: {len(off)} of {len(pairs)} differ, the first at {off[0]}: {pairs[off[0]]}")
    return out


def measure(made: dict[str, Any], args: argparse.Namespace, clocks: ClockLog) -> bool:
    """Fill in what was asked for, writing after each figure; whether all bits were equal."""
    changes = {key: getattr(args, key) for key in ("layers", "micro_batch", "global_batch")}
    ends = ends_at(args.seconds) or float("inf")
    children = {name: Child("cuda", 8) for name in PEERS}

    def ask(name: str, do: str, **more: Any) -> dict[str, Any]:
        answer = children[name].ask(do, timeout_s=max(1.0, min(600.0, ends - time.monotonic())), **more)
        wrong = next((answer[key] for key in ("failed", "unable", "cut") if key in answer), None)
        if wrong is not None:
            made["stopped"] = f"{name}, {do}: {wrong}"
            write(args.out, made)
            raise SystemExit(f"error: {made['stopped']}")
        return answer

    try:
        for name in PEERS:
            ask(name, "build", peer=name, size=args.size, changes=changes)
            made["peers"][name] = ask(name, "check", steps=STEPS) | ask(name, "digest")
        made["differences"] = differences(made)
        write(args.out, made)
        for number in range(args.repetitions):
            for name in PEERS if number % 2 else PEERS[::-1]:
                answer = ask(name, "time", steps=args.steps, warm_up=1, window_s=args.window)
                row = made["peers"][name]
                row.setdefault("seconds", []).append(answer["seconds"])
                row.setdefault("cpu_seconds", []).append(answer["cpu_seconds"])
                row.setdefault("clocks", []).append(clocks.between(*answer["window"]))
                row["peak_memory_bytes"] = answer["memory"]
                write(args.out, made)
                print(f"  {name}: figure {len(row['seconds'])} is written", flush=True)
    finally:
        for child in children.values():
            child.close()
    return not made["differences"]


def main(argv: list[str] | None = None) -> int:
    """Compare, print, write; 1 where a bit differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare.recorded", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=list(sizes()), default="gpt2-xl")
    for name in ("layers", "micro-batch", "global-batch"):
        parser.add_argument(f"--{name}", type=int, default=0, help="instead of the size's own")
    parser.add_argument("--repetitions", type=int, default=3, help="windows of each")
    parser.add_argument("--steps", type=int, default=10, help="of a window, at the least")
    parser.add_argument("--window", type=float, default=1.5, metavar="SECONDS", help="of a window, at the least")
    parser.add_argument("--seconds", type=float, default=0.0, help="of it all, from the start of the process")
    parser.add_argument("--out", type=Path, required=True, help="JSON; written after each figure")
    args = parser.parse_args(argv)
    command = " ".join(["python", "-m", "benchmarks.compare.recorded", *(sys.argv[1:] if argv is None else argv)])
    made: dict[str, Any] = {"command": command, "hardware": hardware("cuda", 8), "size": args.size, "peers": {}}
    with clock_log("cuda") as clocks:
        equal = measure(made, args, clocks)
    print("; ".join(made["differences"]) or f"{STEPS} steps: equal losses, norms, masters and moments, bit for bit")
    times = {name: statistics.median(made["peers"][name]["seconds"]) for name in PEERS}
    print("; ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items()))
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
