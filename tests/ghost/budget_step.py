"""One process on the ghost machine: build a size of the comparison and train three steps, the last between two marks.

    python budget_step.py SIZE LAYERS MICRO_BATCH GLOBAL_BATCH [recorded]
                                                   (started by budgets.py and recorded.py, under the ghost machine)

``recorded``: six steps with ``backend.graphs = "step"``, whose micro-batches are on the GPU. The last two are replays.

Prints one line of JSON: the allocator's peak of the last step, the host's seconds for it, the calls that Python makes
in one more, and the providers.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from ordering import STEP_BEGINS, STEP_ENDS
from torch.nn.attention import SDPBackend

from benchmarks.compare.sizes import sizes
from benchmarks.compare.worker import settled
from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers import linear as linear_kernels
from megatron_port.ext.kernels import attention_choice as attention
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.build import DTYPES, build_engine
from megatron_port.run.device import choose_device

STEPS, RECORDED_STEPS = 3, 6


def host_calls(step: Callable[[], Any]) -> int:
    """Return how many functions, of Python and of C, Python calls in a step whose backward pass runs in this thread."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with torch.autograd.grad_mode.set_multithreading_enabled(False):
        sys.setprofile(note)
        step()
        sys.setprofile(None)
    return calls


def main() -> int:
    """Train and print."""
    name, layers, micro, batch = sys.argv[1], *map(int, sys.argv[2:5])
    recorded = sys.argv[5:] == ["recorded"]
    steps = RECORDED_STEPS if recorded else STEPS
    mark = ctypes.CDLL(None).ghost_mark
    size = settled(sizes()[name], {"layers": layers, "micro_batch": micro, "global_batch": batch})
    device = choose_device("auto")
    m = size.model
    # cuDNN cannot be loaded here; flash attention is what a GPU without it takes.
    attention.gpu_kernels = lambda **_: [SDPBackend.FLASH_ATTENTION]  # type: ignore[attr-defined]
    # The feature test looks at a product's values, of which there are none here; a GPU has the product.
    linear_kernels.widening_addmm = lambda *_: True  # type: ignore[assignment, attr-defined]
    providers = choose_providers(
        BackendConfig(device="cuda"), device, DTYPES[size.dtype], engine="native",
        heads=(m.num_attention_heads, m.kv_heads, m.head_size),
    )
    config = size.run_config()
    config = replace(config, backend=replace(config.backend, graphs="step" if recorded else "off", device="cuda"))
    engine = build_engine(config, ParallelContext.single(device.torch_device), providers, initialise=False)
    tokens = torch.zeros(size.global_batch, m.seq_length, dtype=torch.int64,
                         device=device.torch_device if recorded else "cpu")
    batches = [MicroBatch(tuple(range(i, i + micro)), tokens=tokens[i : i + micro], labels=tokens[i : i + micro])
               for i in range(0, size.global_batch, micro)]
    for step in range(steps):
        last = step == steps - 1
        if last:
            torch.cuda.reset_peak_memory_stats()
            mark(STEP_BEGINS.encode())
        wall, processor = time.perf_counter(), time.process_time()
        engine.train_step(batches, step=step, lr=1e-3)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    mark(STEP_ENDS.encode())
    peak = torch.cuda.max_memory_allocated()
    print(json.dumps({
        "peak_bytes": peak, "host_seconds": processor, "wall_seconds": wall,
        "host_calls": host_calls(lambda: engine.train_step(batches, step=steps, lr=1e-3)),
        "providers": {row.op: row.provider for row in providers.table},
    }), flush=True)
    return 0


if __name__ == "__main__":
    os._exit(main())  # autograd's thread of the device may abort the process while the interpreter ends
