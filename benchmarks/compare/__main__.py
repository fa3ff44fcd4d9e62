"""The same GPT (same FLOPs, batch, precision, optimizer) through this project and what people would use instead.

    python -m benchmarks.compare                                   # what this machine is for: CPU or GPU sizes
    python -m benchmarks.compare --sizes gpt2-xl 6.7b --out benchmarks/results/compare-h200.json
    python -m benchmarks.compare --sizes tiny --peers ours torch --repetitions 1 --steps 1

Every peer runs in a process of its own, starts from the same weights and must give the losses and gradient norms of
plain torch, or of another peer of other code where plain torch has not run (../evidence/performance.md has the
tolerances); one that does not is refused. A peer is timed right after this check, and --out gets its row at once. As
many peers as fit into the memory together stay there and take turns. A peer that cannot run at its documented best is
shown as handicapped and not counted; one that leaves something out says so and is counted.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare.child import ends_at
from benchmarks.compare.clocks import clock_log
from benchmarks.compare.peer import PEERS
from benchmarks.compare.results import document, hardware, peak_of, summary, table, write
from benchmarks.compare.run import Comparison, Plan, kept_peers
from benchmarks.compare.sizes import Size, sizes
from benchmarks.compare.worker import settled

CPU_SIZES = ["quickstart"]
LAYERS = [f"{n}-layers-s{s}" for s in (2048, 8192) for n in ("22b", "175b", "1t", "llama-8b")]
GPU_SIZES = ["gpt2-xl", "6.7b", "llama-8b", *LAYERS]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Of the command line."""
    known = sizes()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(known), metavar="SIZE", help=f"of {', '.join(known)}")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="PEER",
                        help="; ".join(f"{name}: {p.says}" for name, p in PEERS.items()))
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="cuda is also ROCm's name")
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0: 1 on a CPU, 8 with a GPU")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a repetition")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the first repetition")
    parser.add_argument("--window", type=float, default=0.0, metavar="SECONDS",
                        help="a repetition has as many steps as take so long, at least --steps")
    parser.add_argument("--kept", type=int, default=0, help="most peers in memory at once; default: as many as fit")
    for name in ("layers", "micro-batch", "global-batch", "seq"):
        parser.add_argument(f"--{name}", type=int, default=0, help="instead of the size's own")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device, where its name is not known")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one answer of a peer")
    parser.add_argument("--seconds", type=float, default=0.0,
                        help="of it all, from the start of the process; rows of what does not fit say so")
    parser.add_argument("--out", type=Path, help="JSON; written after each repetition of each peer")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write. 1: none of our rows could be measured on some size."""
    args = arguments(argv)
    ends = ends_at(args.seconds)
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here; leave --device out", file=sys.stderr)
        return 3
    threads = args.threads or (1 if device == "cpu" else 8)
    about = hardware(device, threads)
    found: list[dict[str, Any]] = []
    missing = 0
    with clock_log(device) as clocks:
        for name in args.sizes or (CPU_SIZES if device == "cpu" else GPU_SIZES):
            size, plan = planned(args, name, about, ends)
            print(f"{name}: {', '.join(args.peers)}", flush=True)
            found.append({})

            def save(made: Comparison, at: int = len(found) - 1) -> None:
                found[at] = summary(made.size, made.outcomes, made.rates, peak(args, about), made.plan)
                if args.out:
                    write(args.out, document(found, about))

            made = Comparison(size, args.peers, plan, say=partial(print, flush=True), save=save, clocks=clocks)
            made.run()
            print(table(found[-1]), flush=True)
            missing += not any(o.seconds for o in made.outcomes if PEERS[o.peer].ours)
    if args.out:
        print(f"written: {args.out}")
    return int(missing > 0)


def peak(args: argparse.Namespace, about: dict[str, Any]) -> float | None:
    """Return TFLOP/s of the device."""
    return args.peak_tflops or peak_of(about["device"])


def planned(args: argparse.Namespace, name: str, about: dict[str, Any], ends: float | None) -> tuple[Size, Plan]:
    """Return a size as the command line and the device's memory make it, and how it is measured."""
    memory = about.get("memory", 0)
    changes = {key: getattr(args, key) for key in ("layers", "micro_batch", "global_batch", "seq")}
    size = settled(sizes()[name], changes)
    if memory and not changes["layers"] and not size.layers_only:
        changes["layers"] = size.layers_in(memory)
        if changes["layers"] < size.model.num_layers:
            print(f"{name}: {changes['layers']} of its {size.model.num_layers} layers fit", flush=True)
        size = settled(size, changes)
    kept = min(args.kept or len(args.peers), kept_peers(size, args.peers, memory))
    return size, Plan(about["device_kind"], about["threads"], args.repetitions, args.steps, args.warm_up, kept,
                      args.timeout, changes, ends, args.window)


if __name__ == "__main__":
    sys.exit(main())
