"""Own kernels on a CPU against torch's, in one run: python benchmarks/cpu_kernels.py [--threads 2] [--json] [NAME ...]

A case builds what both sides need and returns them as two functions. They run in turn, so that what else the machine
does strikes both; the ratio is that of the medians. ``make kernels`` must have run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from megatron_port.backend import kernels
from megatron_port.backend.cross_entropy import own_cross_entropy
from megatron_port.parallel.cross_entropy import vocab_parallel_cross_entropy

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """``make`` returns one step of the own kernels and one of torch's; ``shape`` is for the reader."""

    name: str
    shape: str
    make: Callable[[], tuple[Step, Step]]
    wanted: float | None = None
    """Least ratio torch ÷ own that the project asks for."""


@dataclass(frozen=True)
class Row:
    """What was measured of a case."""

    name: str
    shape: str
    own_ms: float
    torch_ms: float
    ratio: float
    wanted: float | None


def cross_entropy(rows: int, cols: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """Loss and gradient of the logits. The own step works on what the last one left: its logits are overwritten."""
    logits = torch.randn(rows, cols).to(dtype)
    labels = torch.randint(0, cols, (rows,))
    spent = logits.clone()
    x = logits.clone().requires_grad_()

    def own() -> None:
        leaf = spent.detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            leaf, labels, offset=0, extent=cols, group=None, ops=own_cross_entropy
        )
        loss.mean().backward()

    def plain() -> None:
        x.grad = None
        F.cross_entropy(x, labels).backward()

    return own, plain


CASES = [
    Case("cross_entropy fp32", "512 x 50304", lambda: cross_entropy(512, 50304, torch.float32), 1.5),
    Case("cross_entropy bf16", "512 x 50304", lambda: cross_entropy(512, 50304, torch.bfloat16)),
]


def measure(case: Case, repeats: int) -> Row:
    """Medians over ``repeats`` runs of each side, one after the other, after one of each that does not count."""
    sides = case.make()
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for step, times in zip(sides, seconds):
            start = time.perf_counter()
            step()
            if repeat:
                times.append(time.perf_counter() - start)
    own, plain = (statistics.median(times) for times in seconds)
    return Row(case.name, case.shape, 1e3 * own, 1e3 * plain, plain / own, case.wanted)


def main() -> int:
    """1 where a ratio is below what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases whose name begins so (default: all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    library = kernels.load("cpu")
    chosen = [c for c in CASES if not args.names or c.name.startswith(tuple(args.names))]
    rows = [measure(case, args.repeats) for case in chosen]
    if args.json:
        about = {"library": library, "torch": torch.__version__, "threads": args.threads, "repeats": args.repeats}
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(f"{library}, torch {torch.__version__}, {args.threads} threads, medians of {args.repeats}")
        print(f"{'':24}{'':16}{'own ms':>10}{'torch ms':>10}{'ratio':>8}  wanted")
        for row in rows:
            wanted = "" if row.wanted is None else f"{row.wanted:.1f}"
            print(f"{row.name:24}{row.shape:16}{row.own_ms:10.2f}{row.torch_ms:10.2f}{row.ratio:8.2f}  {wanted}")
    return int(any(row.wanted is not None and row.ratio < row.wanted for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
