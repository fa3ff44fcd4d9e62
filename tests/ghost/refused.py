"""Calls that CUDA refuses while a stream is captured: the ghost machine refuses each, and what is allowed it allows.

    python tests/ghost/refused.py --python ENV/bin/python

Each call is made in a process of its own, in the capture mode of recorded steps. ``recorded.py`` rests on it: a step
that makes such a call fails there as on a GPU. The record is ``benchmarks/results/ghost-refused.json``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask as an index": lambda x: x[x > 0],
    "a tensor from a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a copy from pageable memory": lambda x: x.copy_(torch.ones(x.shape), non_blocking=True),
    "synchronize the stream": lambda x: torch.cuda.current_stream().synchronize(),
    "synchronize the device": lambda x: torch.cuda.synchronize(),
    "query the stream": lambda x: torch.cuda.current_stream().query(),
    "query an event of the capture": lambda x: recorded_event().query(),
    "synchronize an event of the capture": lambda x: recorded_event().synchronize(),
    "query an event from before": lambda x: BEFORE[0].query(),
    "wait for an event from before": lambda x: BEFORE[0].wait(),
    "a stream that does not join back": lambda x: beside(x, join=False),
    "cudaMalloc": lambda x: checked(runtime().cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64))),
    "cudaMemcpy": lambda x: checked(
        runtime().cudaMemcpy(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(4), 3)),
    "cudaFree": lambda x: checked(runtime().cudaFree(ctypes.c_void_p(x.data_ptr()))),
    "random numbers of a generator that the graph does not know": lambda x: torch.rand(
        4, device=x.device, generator=OTHER[0]),
}
"""Each must raise, or its capture must."""
ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a kernel": lambda x: x.add_(1.0),
    "new memory of the allocator": lambda x: torch.empty(1 << 24, device=x.device).zero_(),
    "a stream that joins back": lambda x: beside(x, join=True),
    "a product": lambda x: x @ x,
    "a copy to pinned memory": lambda x: PINNED[0].copy_(x, non_blocking=True),
    "new pinned memory": lambda x: torch.ones(1 << 20).pin_memory(),
    "a backward pass": lambda x: (x.clone().requires_grad_() @ x).sum().backward(),
}
BEFORE: list[torch.cuda.Event] = []
OTHER: list[torch.Generator] = []
PINNED: list[torch.Tensor] = []


def runtime() -> ctypes.CDLL:
    """Return the CUDA runtime, without torch."""
    return ctypes.CDLL(None)


def checked(error: int) -> None:
    """Raise RuntimeError for an error of the runtime."""
    if error:
        raise RuntimeError(f"the runtime answers {error}")


def recorded_event() -> torch.cuda.Event:
    """Return an event of the stream that is captured."""
    event = torch.cuda.Event()
    event.record()
    return event


def beside(x: torch.Tensor, *, join: bool) -> None:
    """Launch on another stream that the captured one has told to begin."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.add_(1.0)
    if join:
        torch.cuda.current_stream().wait_stream(stream)


def said_of(call: Callable[[torch.Tensor], Any]) -> str:
    """Capture a call as ``kernels.step_graphs`` captures a step, and replay it; return the error, or ""."""
    device = torch.device("cuda", 0)
    x = torch.ones(8, 8, device=device)
    x @ x  # the library's handle and workspace
    BEFORE.append(recorded_event())
    OTHER.append(torch.Generator(device))
    PINNED.append(torch.empty(8, 8).pin_memory())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
            call(x)
        graph.replay()
    except RuntimeError as error:
        first = error.__context__ or error
        return str(first).splitlines()[0]
    return ""


def in_a_child(call: Callable[[torch.Tensor], Any]) -> str:
    """:func:`said_of` in a child: a capture that failed leaves torch's allocator in a state."""
    end, other = os.pipe()
    if os.fork() == 0:
        os.write(other, said_of(call).encode())
        os._exit(0)
    os.close(other)
    with os.fdopen(end, "rb") as answer:
        said = answer.read().decode()
    os.wait()
    return said


def main() -> int:
    """Run this file on the machine; 1 if a call is allowed that should not be, or the other way round."""
    from options import ROOT, chosen_torch, commit, machine, parser

    made = parser(__doc__)
    made.add_argument("--record", action="store_true", help="write benchmarks/results/ghost-refused.json")
    a = made.parse_args()
    chosen = chosen_torch(a.python)
    with machine(chosen, devices=1) as node:
        out = node.scratch / "said.json"
        ended = node.start(str(Path(__file__).resolve()), "--inside", str(out))
        if not out.exists():
            print(ended.output, file=sys.stderr)
            return 1
        said = json.loads(out.read_text())
    wrong = [name for name in REFUSED if not said[name]] + [name for name in ALLOWED if said[name]]
    row = {"ok": not wrong, "wrong": wrong, "commit": commit(), "torch": chosen.version, "said": said}
    print(json.dumps(row, indent=1))
    if a.record:
        (ROOT / "benchmarks" / "results" / "ghost-refused.json").write_text(json.dumps(row, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    if "--inside" in sys.argv:
        Path(sys.argv[-1]).write_text(json.dumps({n: in_a_child(c) for n, c in (REFUSED | ALLOWED).items()}))
        sys.exit(0)
    sys.exit(main())
