"""Cost and saving of a mask in the own CPU attention, forward and backward, in one run on one thread.

    python benchmarks/attention_masks.py [--before LIBRARY] [--repeats 7] [--json FILE]

Cases take turns, so that what else the machine does strikes all; a ratio is that of the least processor times, against
attention over the whole sequence without a mask. ``--before``: a libmp_cpu of ABI 4, from before masks, through its C
ABI; the new library is called in the same way beside it, and both must give the same bits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.layers.attention import AttentionMask
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops.attention import attention

SEQ, HEADS, GROUPS, SIZE = 4096, 4, 2, 64
Step = Callable[[], object]


def masks() -> dict[str, AttentionMask | None]:
    """Masks by name; ``whole``: none."""
    starts = (torch.arange(SEQ, dtype=torch.int32) // 512 * 512)[None].contiguous()
    return {
        "whole": None, "one document": AttentionMask(first=torch.zeros(1, SEQ, dtype=torch.int32)),
        "8 documents of 512": AttentionMask(first=starts), "window 512": AttentionMask(window=512),
        "sinks": AttentionMask(sinks=torch.zeros(HEADS)), "soft-cap": AttentionMask(softcap=50.0),
    }


def steps(dtype: torch.dtype) -> dict[str, Step]:
    """A forward pass and a forward with its backward of each mask."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SEQ, 1, n, SIZE, generator=draw).to(dtype) for n in (HEADS, GROUPS, GROUPS))
    grad = torch.randn(SEQ, 1, HEADS * SIZE, generator=draw).to(dtype)

    def forward(mask: AttentionMask | None) -> None:
        attention(q, k, v, mask=mask)

    def both(mask: AttentionMask | None) -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attention(*leaves, mask=mask), leaves, grad)

    passes = {"forward": forward, "forward and backward": both}
    return {f"{name}, {way}": partial(step, mask) for name, mask in masks().items() for way, step in passes.items()}


class _Shape(ctypes.Structure):
    """``mp_attention_shape``."""

    _fields_ = [(n, ctypes.c_int64) for n in ("seq", "keys", "batch", "groups", "per_group", "d")] + [
        ("causal", ctypes.c_int32), ("scale", ctypes.c_float)]


def by_c_abi(library: Path, *, masked: bool) -> tuple[Step, Step, list[torch.Tensor]]:
    """Forward and backward of a library in fp32, and what they fill. ``masked``: its functions take masks (ABI 5)."""
    lib: Any = ctypes.CDLL(str(library))
    draw = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(SEQ, 1, GROUPS, HEADS // GROUPS, SIZE, generator=draw) for _ in range(2))
    k, v = (torch.randn(SEQ, 1, GROUPS, SIZE, generator=draw) for _ in range(2))
    made = [torch.zeros_like(x) for x in (q, q, k, v)]
    rows = torch.zeros(HEADS, 2, SEQ)
    shape = _Shape(SEQ, SEQ, 1, GROUPS, HEADS // GROUPS, SIZE, 1, SIZE**-0.5)

    def of(x: torch.Tensor) -> Any:
        return ctypes.c_void_p(x.data_ptr())

    def strides(x: torch.Tensor) -> Any:
        return (ctypes.c_int64 * (x.dim() - 1))(*x.stride()[:-1])

    def inputs() -> list[Any]:
        return [part for x in (q, k, v) for part in (of(x), strides(x))]

    none, end = [None] * (2 if masked else 1), [None] if masked else []

    def forward() -> None:
        assert lib.mp_attention_forward(None, 0, ctypes.byref(shape), *inputs(), *none, of(made[0]), of(rows)) == 0

    def backward() -> None:
        filled = [part for x in made[1:] for part in (of(x), strides(x))]
        code = lib.mp_attention_backward(
            None, 0, ctypes.byref(shape), of(dout), *inputs(), of(made[0]), of(rows), *none, *filled, *end
        )
        assert code == 0

    return forward, backward, made


def least(cases: dict[str, Step], repeats: int) -> dict[str, float]:
    """Least milliseconds of the processor for each case, which take turns."""
    found = dict.fromkeys(cases, float("inf"))
    for _ in range(repeats):
        for name, step in cases.items():
            started = time.process_time()
            step()
            found[name] = min(found[name], 1e3 * (time.process_time() - started))
    return found


def against_before(before: Path, now: Path, repeats: int) -> dict[str, Any]:
    """Ratios of the new library's times without a mask to the old one's, whose bits it must give."""
    old, new = by_c_abi(before, masked=False), by_c_abi(now, masked=True)
    times = least({
        "before forward": old[0], "now forward": new[0], "before backward": old[1], "now backward": new[1],
    }, repeats)
    same = all(torch.equal(a, b) for a, b in zip(old[2], new[2]))
    return {"milliseconds": times, "same bits": same, **{
        f"{way} / before": times[f"now {way}"] / times[f"before {way}"] for way in ("forward", "backward")}}


def main() -> None:
    """Measure, print, and write a record."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = kernels.load("cpu")
    out: dict[str, Any] = {"library": name, "shape": f"{SEQ} tokens, {HEADS} heads of {SIZE}, {GROUPS} groups",
                           "threads": 1, "repeats": args.repeats, "clock": "cpu", "rows": []}
    if args.before is not None:
        now = Path(kernels.__file__).parents[1] / "_kernels" / name.split()[0]
        out["without a mask"] = against_before(args.before, now, args.repeats)
        print(json.dumps(out["without a mask"], indent=1))
    for dtype in (torch.float32, torch.bfloat16):
        times = least(steps(dtype), args.repeats)
        for case, ms in times.items():
            ratio = ms / times[f"whole, {case.partition(', ')[2]}"]
            out["rows"].append({"case": case, "dtype": str(dtype)[6:], "ms": round(ms, 2), "of whole": round(ratio, 3)})
            print(f"{case:<42} {str(dtype)[6:]:<9} {ms:9.2f} ms  {ratio:6.3f} of the whole", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
