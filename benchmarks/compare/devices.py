"""Does a step on the GPU compute what it computes on the CPU? Same weights, same batches, fp32 and bf16.

    python -m benchmarks.compare.devices --out step.json
    python -m benchmarks.compare.devices --device cpu          # the CPU against itself: that it runs

For each size the losses and gradient norms of this project's first five steps (or, of layers alone, elements of the
output and of the input's gradient) on the device are compared with plain torch's on the CPU, in the tolerances of the
comparison (``run.TOLERANCE``), with the own kernels and without. Products in fp32 are computed in fp32: TF32 is off.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare.peer import REFERENCE, Unable, build
from benchmarks.compare.results import hardware, write
from benchmarks.compare.run import CHECKED_STEPS, differences
from benchmarks.compare.sizes import Size, sizes
from benchmarks.compare.weights import batch
from benchmarks.compare.worker import numbers_of

SIZES = ("tiny", "tiny-bf16", "tiny-gpt2", "tiny-llama", "tiny-layers", "tiny-llama-layers")
PEERS = ("ours", "ours-recorded", "ours-no-kernels", "torch")


def numbers(peer: str, size: Size, device: torch.device) -> dict[str, list[float]]:
    """Return the losses and gradient norms (or probes) of a new peer's first steps."""
    batches = [batch(size, i, device) for i in range(CHECKED_STEPS)]
    return numbers_of(build(peer, size, device), size, batches)


def compared(size: Size, device: torch.device) -> list[dict[str, Any]]:
    """A row for each peer: its largest difference from plain torch on the CPU, in tolerances."""
    reference = numbers(REFERENCE, size, torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    for peer in PEERS:
        row: dict[str, Any] = {"size": size.name, "dtype": size.dtype, "peer": peer}
        try:
            found = numbers(peer, size, device)
            row |= {"difference_over_tolerance": differences(size, found, reference), **found}
        except Unable as error:
            row["unable"] = str(error)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Compare, print, write; 1 where a peer is off by more than its tolerance or ours cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare.devices", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cuda is also ROCm's name")
    parser.add_argument("--sizes", nargs="+", choices=list(sizes()), default=list(SIZES), metavar="SIZE")
    parser.add_argument("--out", type=Path, help="JSON; written after each size")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here; --device cpu compares the CPU with itself", file=sys.stderr)
        return 3
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    made: dict[str, Any] = {"hardware": hardware(args.device, torch.get_num_threads()), "rows": []}
    for name in args.sizes:
        rows = compared(sizes()[name], device)
        made["rows"] += rows
        for row in rows:
            off = row.get("difference_over_tolerance")
            says = row["unable"] if off is None else f"{off:.3g} tolerances from plain torch on the CPU"
            print(f"{name:<20}{row['peer']:<18}{says}", flush=True)
        if args.out:
            write(args.out, made)
    wrong = [r for r in made["rows"] if not r.get("difference_over_tolerance", 0.0) <= 1.0]
    lacking = [r for r in made["rows"] if r["peer"] == "ours" and "unable" in r]
    return int(bool(wrong or lacking))


if __name__ == "__main__":
    sys.exit(main())
