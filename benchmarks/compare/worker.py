"""One peer in a process of its own: reads a request a line from stdin, writes an answer a line to stdout (JSON).

Requests: ``ready``, ``build``, ``check`` (the numbers of the first steps), ``time`` (a window of steps), ``digest``
(hashes of the state), ``matmul``, ``quit``.
What libraries print goes to stderr.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.compare.peer import LayerStep, Step, Unable, build
from benchmarks.compare.sizes import Size, sizes
from benchmarks.compare.weights import batch, probes
from megatron_port.ext.health.replicas import BitsHash
from megatron_port.tools.bench.measure import seconds_of

BATCHES = 4
"""Different ones that a window takes in turn."""


def settled(size: Size, changes: dict[str, int]) -> Size:
    """A size with what the command line changed: ``layers``, ``micro_batch``, ``global_batch``, ``seq``."""
    model = size.model
    if changes.get("layers"):
        model = replace(model, num_layers=changes["layers"])
    if changes.get("seq"):
        model = replace(model, seq_length=changes["seq"])
    return replace(
        size, model=model, micro_batch=changes.get("micro_batch") or size.micro_batch,
        global_batch=changes.get("global_batch") or size.global_batch,
    )


class PeakMemory:
    """Bytes at the most since ``start``: of CUDA's allocator, else of this process over what it had before."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0
        if device.type == "cpu":
            gc.collect()
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
            self.before = _status("VmRSS")

    def bytes(self) -> int:
        """So far."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        peak = _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak - self.before)


def _status(name: str) -> int:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


class Worker:
    """State between requests."""

    def __init__(self, device: str) -> None:
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.peer: Step | None = None
        self.at = 0
        self.seconds = 0.0
        """Of a step in the last window."""

    def synchronize(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ready(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer: everything is imported, and the device can be used."""
        return {}

    def build(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build the peer and put the batches on the device."""
        self.size = settled(sizes()[request["size"]], request.get("changes", {}))
        self.batches = [batch(self.size, i, self.device) for i in range(BATCHES)]
        self.memory = PeakMemory(self.device)
        started = time.perf_counter()
        self.peer = build(request["peer"], self.size, self.device)
        self.synchronize()
        about = self.peer.about
        return {"settings": about.settings, "handicap": about.handicap, "favour": about.favour,
                "seconds": time.perf_counter() - started}

    def _step(self) -> tuple[Any, Any]:
        assert self.peer is not None
        found = self.peer.step(*self.batches[self.at % BATCHES])
        self.at += 1
        return found

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """See :func:`numbers_of`."""
        assert self.peer is not None
        self.at = request["steps"]
        return numbers_of(self.peer, self.size, [self.batches[i % BATCHES] for i in range(request["steps"])])

    def time(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of a step over a window of them: the device is waited for at its two ends only.

        At least ``steps``, and as many as take ``window_s`` by the last window. ``cpu_seconds``: of this process'
        threads, which other jobs on the machine disturb less. ``window``: its ends by time.monotonic.
        """
        for _ in range(request.get("warm_up", 0)):
            self._step()
        if request.get("window_s") and not self.seconds:
            self.synchronize()
            started = time.perf_counter()
            self._step()
            self.synchronize()
            self.seconds = time.perf_counter() - started
        count = request["steps"]
        if self.seconds:
            count = max(count, math.ceil(request.get("window_s", 0.0) / self.seconds))
        self.synchronize()
        begin, started, used = time.monotonic(), time.perf_counter(), time.process_time()
        for _ in range(count):
            self._step()
        self.synchronize()
        self.seconds = (time.perf_counter() - started) / count
        cpu = (time.process_time() - used) / count
        return {"seconds": self.seconds, "cpu_seconds": cpu, "memory": self.memory.bytes(), "steps": count,
                "window": [begin, time.monotonic()]}

    def digest(self, request: dict[str, Any]) -> dict[str, Any]:
        """Hash of each piece of the state of this project's engine: masters and moments; the same bits, the same
        hashes."""
        digest = BitsHash(self.device)
        pieces = cast(Any, self.peer).engine.state_pieces()
        return {"digest": torch.stack([digest(piece.tensor) for piece in pieces]).tolist()}

    def matmul(self, request: dict[str, Any]) -> dict[str, Any]:
        """See :func:`rates`."""
        begin = time.monotonic()
        found: dict[str, Any] = rates(self.device, request["dtype"], small=request["small"])
        found["window"] = [begin, time.monotonic()]
        if self.device.type == "cuda":  # this process stays beside the peers
            torch.cuda.empty_cache()
        return found


def numbers_of(peer: Step, size: Size, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, list[float]]:
    """Losses and gradient norms of a new peer's first steps; of a stack of layers elements of output and input gradient
    and the norm of all weights' gradients, all of the first batch."""
    if size.layers_only:
        out, dx = peer.step(*batches[0])
        return {"probes": probes(out, dx), "grad_norms": [float(cast(LayerStep, peer).gradient_norm())]}
    steps = [peer.step(*batch) for batch in batches]
    return {"losses": [float(a) for a, _ in steps], "grad_norms": [float(b) for _, b in steps if b is not None]}


def rates(device: torch.device, dtype: str, *, small: bool = False) -> dict[str, float]:
    """FLOP/s of a large square product of random numbers, and bytes/s of a copy (read and write). ``small``: of sizes
    whose rates say nothing; the ghost machine takes a minute for one product of a GPU's size."""
    cuda = device.type == "cuda"
    n, copied = (256, 1 << 20) if small else (8192, 1 << 30) if cuda else (1024, 64 << 20)
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16 if dtype == "bf16" else torch.float32) for _ in range(2))
    out = torch.empty_like(a)
    seconds = seconds_of(lambda: torch.mm(a, b, out=out), device, budget_s=1.0)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device, budget_s=0.5)
    return {"flops": 2.0 * n**3 / seconds, "bandwidth": 8.0 * source.numel() / copy, "size": n}


def main() -> int:
    """Serve until ``quit`` or the end of stdin. ``argv``: device, threads."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(sys.argv[2]))
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            break
        try:
            answer = getattr(worker, request["do"])(request)
        except Unable as error:
            answer = {"unable": str(error)}
        except torch.OutOfMemoryError as error:
            answer = {"unable": f"out of memory: {str(error).splitlines()[0][:200]}"}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {str(error)[:400]}"}
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
