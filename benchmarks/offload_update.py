"""The host's update of offloaded state: own kernel, DeepSpeed's CPUAdam, torch's fused AdamW, and what memory allows.

``python benchmarks/offload_update.py --out FILE``. All sides take turns, so that what else the machine does strikes
each alike; with ``--cpu-time`` on one thread. The bound is the time in which the same bytes pass through memory in the
simplest loop there is (``torch.add`` of three arrays).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops.optimizer import adamw_

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1
BYTES = {"own, bf16 weights": 30, "own": 28, "torch fused": 28, "DeepSpeed CPUAdam": 28}
"""Read and written per element: gradient, master and two moments read; master, moments and weight written."""


def own(numel: int, weight_dtype: torch.dtype | None) -> Callable[[], None]:
    """Return an update by the own kernel, of weights in another dtype as well where one is given."""
    master, gradient, first, second = torch.randn(numel), torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    weights = [] if weight_dtype is None else [master.to(weight_dtype)]
    step = torch.ones((), dtype=torch.int64)
    return lambda: adamw_(
        weights, [master], [gradient], [first], [second], step=step, grad_scale=None, skip=None, lr=LR,
        beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY,
    )


def library(numel: int, make: Callable[..., Any]) -> Callable[[], None]:
    """Return a step of an optimizer of one parameter."""
    parameter = torch.randn(numel, requires_grad=True)
    parameter.grad = torch.randn(numel)
    optimizer = make([parameter])
    return lambda: optimizer.step()


def sides(numel: int) -> dict[str, Callable[[], None]]:
    """Return what is timed, by name; DeepSpeed's only where its kernel is built."""
    out = {
        "own, bf16 weights": own(numel, torch.bfloat16), "own": own(numel, None),
        "torch fused": library(numel, lambda p: torch.optim.AdamW(
            p, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        out["DeepSpeed CPUAdam"] = library(numel, lambda p: DeepSpeedCPUAdam(
            p, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True))
    except Exception as error:  # not installed, or its kernel is not built
        print(f"DeepSpeed's CPUAdam is left out: {type(error).__name__}: {error}")
    a, b, c = (torch.randn(numel) for _ in range(3))
    out["memory"] = lambda: torch.add(a, b, out=c)
    return out


def main() -> int:
    """Time all sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 25)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, not the clock's")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    described = kernels.load("cpu")
    timed = sides(args.numel)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(args.repeats + 1):
        for name, run in timed.items():
            begun = clock()
            run()
            if repeat:
                seconds[name].append(clock() - begun)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    rate = 12 * args.numel / middle["memory"]
    rows = [
        {"name": name, "elements_per_second": args.numel / middle[name], "bytes_per_element": BYTES[name],
         "of_memory_bound": BYTES[name] * args.numel / rate / middle[name],
         "time_over_own": middle[name] / middle["own"]}
        for name in timed if name != "memory"
    ]
    about = {"kernels": described, "torch": torch.__version__, "numel": args.numel, "threads": args.threads,
             "repeats": args.repeats, "clock": "cpu" if args.cpu_time else "wall", "memory_bytes_per_second": rate}
    for row in rows:
        print(f"{row['name']:20}{row['elements_per_second'] / 1e6:8.0f} M elements/s"
              f"{row['of_memory_bound']:8.2f} of the memory bound{row['time_over_own']:8.2f} x own's time")
    if args.out is not None:
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
