"""Captured steps against the same steps call by call: the same bits, then what a step takes.

    python -m benchmarks.compare.recorded --size gpt2-xl --layers 12 --global-batch 16 --out recorded.json

Both train from the same weights in a process of their own. Six steps each, the last three of them replays: losses and
gradient norms must be equal to the bit, and so must hashes of all masters and moments. Where they are not, steps call
by call are run once more: a library whose sums differ from run to run is no fault of the recording. Then windows of
steps in turn. The file is written after each of these.
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


def differences(called: dict[str, Any], replayed: dict[str, Any]) -> list[str]:
    """Return what differs between two runs' numbers and state, for people; nothing where all bits are equal."""
    out = []
    for kind in ("losses", "grad_norms", "digest"):
        pairs = list(zip(called[kind], replayed[kind], strict=True))
        off = [i for i, (a, b) in enumerate(pairs) if a != b]
        if off:
            out.append(f"{kind}: {len(off)} of {len(pairs)} differ, the first at {off[0]}: {pairs[off[0]]}")
    return out


class Runs:
    """The two processes, and the file that their figures go to."""

    def __init__(self, made: dict[str, Any], args: argparse.Namespace) -> None:
        self.made, self.args, self.ends = made, args, ends_at(args.seconds) or float("inf")
        self.changes = {key: getattr(args, key) for key in ("layers", "micro_batch", "global_batch")}
        self.children = {name: Child("cuda", 8) for name in PEERS}

    def write(self) -> None:
        """Replace the file."""
        write(self.args.out, self.made)

    def ask(self, name: str, do: str, **more: Any) -> dict[str, Any]:
        """Ask a process. Raises SystemExit where it has no answer."""
        seconds = max(1.0, min(600.0, self.ends - time.monotonic()))
        answer: dict[str, Any] = self.children[name].ask(do, timeout_s=seconds, **more)
        wrong = next((answer[key] for key in ("failed", "unable", "cut") if key in answer), None)
        if wrong is not None:
            self.made["stopped"] = f"{name}, {do}: {wrong}"
            self.write()
            raise SystemExit(f"error: {self.made['stopped']}")
        return answer

    def numbers(self, name: str, peer: str) -> dict[str, Any]:
        """Build a peer and return what its first steps compute."""
        self.ask(name, "build", peer=peer, size=self.args.size, changes=self.changes)
        return self.ask(name, "check", steps=STEPS) | self.ask(name, "digest")

    def prove(self) -> bool:
        """Compare the bits; whether recording changed none."""
        peers = self.made["peers"]
        for name in PEERS:
            peers[name] = self.numbers(name, name)
        called, replayed = (peers[name] for name in PEERS)
        self.made["differences"] = differences(called, replayed)
        self.write()
        if not self.made["differences"]:
            return True
        self.children["again"] = Child("cuda", 8)
        self.made["differences_call_by_call"] = differences(called, self.numbers("again", "ours"))
        self.write()
        self.children.pop("again").close()
        return bool(self.made["differences_call_by_call"])

    def time(self, clocks: ClockLog) -> None:
        """Time windows of steps in turn."""
        for number in range(self.args.repetitions):
            for name in PEERS if number % 2 else PEERS[::-1]:
                answer = self.ask(name, "time", steps=self.args.steps, warm_up=1, window_s=self.args.window)
                row = self.made["peers"][name]
                row.setdefault("seconds", []).append(answer["seconds"])
                row.setdefault("cpu_seconds", []).append(answer["cpu_seconds"])
                row.setdefault("clocks", []).append(clocks.between(*answer["window"]))
                row["peak_memory_bytes"] = answer["memory"]
                self.write()
                print(f"  {name}: figure {len(row['seconds'])} is written", flush=True)

    def close(self) -> None:
        """End all processes."""
        for child in self.children.values():
            child.close()


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
    runs = Runs(made, args)
    try:
        with clock_log("cuda") as clocks:
            equal = runs.prove()
            runs.time(clocks)
    finally:
        runs.close()
    if made.get("differences_call_by_call"):
        print(f"steps call by call differ from each other: {'; '.join(made['differences_call_by_call'])}")
    print("; ".join(made["differences"]) or f"{STEPS} steps: equal losses, norms, masters and moments, bit for bit")
    times = {name: statistics.median(made["peers"][name]["seconds"]) for name in PEERS}
    print("; ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items()))
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
