"""Layers of experts on a CPU: moving rows against a copy, the router against torch's ops, the grouped product against a
loop, each in one run.

    python benchmarks/experts.py [--json FILE] [--repeats 25]        make kernels must have run

*rows*: bytes per second of the own ops, each row read and written counted once, as a share of what copying the moved
rows takes: the faster of torch's ``copy_`` and ``memcpy``. Tokens go to k of the experts at random. Memory is kept by
the process, since that of a new mapping costs more to get than to copy. A call of an own op costs some 10 µs.

*route*: scores, choice and weights of float32 logits, and the logits' gradient, by the own router and by torch's ops.

*grouped*: ``torch.nn.functional.grouped_mm`` of equal groups against ``torch.cat`` of a product for each expert,
against the loop that looks up each expert's rows, and against one product of all rows with one expert's weight, which
is the most that any grouping can reach.

Sides run in turn and the least time of each counts. One thread and its processor time, so that what else the machine
runs takes little part; ``--threads 2`` takes the wall clock.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_port.ext.experts.experts import ExpertOps, torch_experts
from megatron_port.ext.experts.torch_ops import Routing
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose_experts import own_experts

Step = Callable[[], object]
Clock = Callable[[], float]
Row = dict[str, object]
ROWS = [  # tokens, columns, k, experts
    (4096, 7168, 2, 32), (1024, 7168, 8, 256), (64, 7168, 8, 256), (16384, 512, 8, 64), (8192, 512, 2, 8),
    (1024, 512, 2, 8),
]
ROUTE = [  # tokens, experts, k, groups
    (8192, 8, 2, 1), (8192, 64, 8, 1), (8192, 128, 8, 1), (8192, 256, 8, 8),
]
GROUPED = [  # experts, rows of each, in, out
    (32, 128, 256, 512), (32, 128, 512, 256), (32, 16, 256, 512), (32, 16, 512, 256), (32, 4, 256, 512),
    (8, 512, 256, 512),
]
_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def least_ms(sides: dict[str, Step], repeats: int, clock: Clock) -> dict[str, float]:
    """Least milliseconds of each side. A time is that of calls that take some milliseconds together, after as many that
    do not count: the caches hold what the side leaves there, not the one before it."""
    best = dict.fromkeys(sides, float("inf"))
    for turn in range(repeats + 1):
        for name, side in sides.items():
            count = max(1, int(4 / best[name]))
            for timed in (False, True):
                start = clock()
                for _ in range(count):
                    side()
                if timed or not turn:
                    best[name] = min(best[name], 1e3 * (clock() - start) / count)
    return best


def routed(tokens: int, k: int, experts: int) -> tuple[Tensor, Tensor]:
    """(source, place) of tokens that go to k experts at random."""
    chosen = torch.rand(tokens, experts).topk(k).indices.sort(-1).values
    copies = chosen.flatten().argsort(stable=True)
    place = torch.empty_like(copies)
    place[copies] = torch.arange(copies.numel())
    return copies // k, place.view(tokens, k)


def rows_case(tokens: int, cols: int, k: int, experts: int, dtype: torch.dtype) -> tuple[dict[str, Step], float]:
    """Sides, and bytes of the moved rows."""
    source, place = routed(tokens, k, experts)
    x, y = (torch.randn(rows, cols).to(dtype) for rows in (tokens, tokens * k))
    out, weight = torch.empty_like(y), torch.rand(tokens, k)
    size = y.numel() * y.element_size()
    return {
        "copy_": lambda: out.copy_(y),
        "memcpy": lambda: _libc.memcpy(out.data_ptr(), y.data_ptr(), size),
        "gather_rows": lambda: own_experts.gather_rows(x, source),
        "sum_rows": lambda: own_experts.sum_rows(y, place, weight),
        "sum_rows_backward": lambda: own_experts.sum_rows_backward(x, y, place, weight),
    }, size


def rows_result(case: tuple[int, int, int, int], dtype: torch.dtype, repeats: int, clock: Clock) -> Row:
    """Times, and the share of a copy's bytes per second."""
    tokens, cols, k, experts = case
    sides, size = rows_case(*case, dtype)
    ms = least_ms(sides, repeats, clock)
    copy = min(ms["copy_"], ms["memcpy"])
    moved = {"gather_rows": 2 * k, "sum_rows": k + 1, "sum_rows_backward": 2 * k + 1}  # rows of a token
    shares = {name: copy / ms[name] * n / (2 * k) for name, n in moved.items()}
    return {"tokens": tokens, "columns": cols, "k": k, "experts": experts, "dtype": name_of(dtype),
            "moved_mb": size / 1e6, "ms": rounded(ms), "share_of_copy": rounded(shares)}


def route_result(case: tuple[int, int, int, int], repeats: int, clock: Clock) -> Row:
    """Times of both providers, and their ratio."""
    tokens, experts, k, groups = case
    logits, bias = torch.randn(tokens, experts), torch.randn(experts) * 0.05

    routing = Routing(k, groups=groups, top_groups=max(1, groups // 2))

    def both_ways(ops: ExpertOps) -> Step:
        def step() -> Tensor:
            chosen, weights, scores, _ = ops.route(logits, bias, routing)
            return ops.route_backward(scores, chosen, weights, scores, routing)

        return step

    ms = least_ms({"own": both_ways(own_experts), "torch": both_ways(torch_experts)}, repeats, clock)
    return {"tokens": tokens, "experts": experts, "k": k, "groups": groups, "ms": rounded(ms),
            "torch_to_own": round(ms["torch"] / ms["own"], 1)}


def grouped_case(experts: int, rows: int, inner: int, outer: int, dtype: torch.dtype) -> dict[str, Step]:
    """The same product in four ways; the last is one of another result and as many operations."""
    x = torch.randn(experts * rows, inner).to(dtype)
    weight = (torch.randn(experts, outer, inner) * 0.05).to(dtype)
    offsets = torch.arange(1, experts + 1, dtype=torch.int32) * rows
    expert = torch.arange(experts).repeat_interleave(rows)

    def loop() -> Tensor:
        return torch.cat([part @ weight[e].t() for e, part in enumerate(x.split(rows))])

    def into() -> Tensor:
        y = x.new_empty((x.shape[0], outer))
        for e, part in enumerate(x.split(rows)):
            torch.mm(part, weight[e].t(), out=y[e * rows : (e + 1) * rows])
        return y

    def looked_up() -> Tensor:
        y = x.new_zeros((x.shape[0], outer))
        for e in range(experts):
            at = torch.where(expert == e)[0]
            y.index_add_(0, at, F.linear(x[at], weight[e]))
        return y

    def grouped() -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    if not torch.equal(loop(), grouped()):
        raise RuntimeError("grouped_mm and the loop differ")
    return {"loop": loop, "loop into one output": into, "loop with look-up": looked_up, "grouped_mm": grouped,
            "one product": lambda: x @ weight[0].t()}


def grouped_result(case: tuple[int, int, int, int], dtype: torch.dtype, repeats: int, clock: Clock) -> Row:
    """Times, and ratios of the loops to the grouped product and to one product."""
    experts, rows, inner, outer = case
    ms = least_ms(grouped_case(*case, dtype), repeats, clock)
    ratios = {name: ms[name] / ms["grouped_mm"] for name in ms if name.startswith("loop")}
    return {"experts": experts, "rows_each": rows, "in": inner, "out": outer, "dtype": name_of(dtype),
            "ms": rounded(ms), "ratio_to_grouped": rounded(ratios),
            "most_that_grouping_can_reach": round(ms["loop"] / ms["one product"], 2)}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    _libc.mallopt(-4, 0)  # M_MMAP_MAX
    _libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    about = {"library": kernels.load("cpu"), "torch": torch.__version__, "threads": args.threads,
             "repeats": args.repeats, "clock": clock.__name__}
    dtypes = (torch.bfloat16, torch.float32)
    sides: dict[str, list[Callable[[], Row]]] = {
        "rows": [partial(rows_result, case, dtype, args.repeats, clock) for case in ROWS for dtype in dtypes],
        "route": [partial(route_result, case, args.repeats, clock) for case in ROUTE],
        "grouped": [partial(grouped_result, case, dtype, args.repeats, clock) for case in GROUPED for dtype in dtypes],
    }
    parts = [f'"about": {json.dumps(about)}']
    for kind, measured in sides.items():
        lines = []
        for measure in measured:
            lines.append(json.dumps(measure()))
            print(lines[-1], flush=True)
        parts.append(f'"{kind}": [\n' + ",\n".join(f"  {line}" for line in lines) + "]")
    if args.json:
        args.json.write_text("{" + ",\n ".join(parts) + "}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
