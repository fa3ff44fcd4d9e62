"""A model whose state is four times what a rank may allocate trains with ZeRO-3 and its optimizer state on a disk.

Each rank limits its private memory (``RLIMIT_DATA``: heap and anonymous mappings, the libraries' included) to a quarter
of the unsharded state: 18 bytes per parameter in bf16 (weight 2, gradient 4, master and moments 12). Under the limit
the run with offload takes the steps of the unlimited run without it, to the bit, and the run without offload fails.

``python tests/distributed/offload_memory.py --out FILE``
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import make_config
from offload_matrix import Steps, advance, engine_of, offloaded
from pool import RankFailed, RankPool

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.mesh import Topology

STATE_BYTES = 18
"""Per parameter: weight 2, gradient 4, master and two moments 12."""
STEPS = 3
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Parameters of mallopt(3)."""


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def return_freed_memory() -> None:
    """Let glibc return blocks of 64 KiB and more as soon as they are freed: what it keeps counts under the limit."""
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    library.mallopt(M_ARENA_MAX, 1)


def train(config: RunConfig, topology: Topology, limit: int) -> dict[str, Any]:
    """On a rank: the steps' results and the memory, under a limit where one is given."""
    before = status("VmData")
    return_freed_memory()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with engine_of(config, topology) as engine:
        largest, steps = 0, Steps()
        for step in range(STEPS):
            steps += advance(engine, range(step, step + 1))
            largest = max(largest, status("VmData"))
        return {"steps": steps, "before": before, "data": largest, "peak_rss": status("VmHWM"),
                "parameters": sum(record.numel for record, _ in engine.parameters)}


def run_config(layers: int, hidden: int, dp: int) -> RunConfig:
    """Many thin layers, so that the two that are whole at a time are a small part."""
    config = make_config(
        dtype="bf16", micro_batch_size=1, global_batch_size=dp, own_kernels="on",
        model={"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 8, "vocab_size": 512,
               "seq_length": 16, "tie_embeddings": False},
        layout={"zero_stage": 3, "data_parallel_size": dp, "reduce_bucket_size": 1 << 20},
    )
    # Hashing the state reads all of it twice per step: not what is measured here.
    return dataclasses.replace(config, numerics=dataclasses.replace(config.numerics, state_check_interval=0))


def main() -> int:
    """Run without a limit, with limit and offload, and with the limit alone; 0 if it is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=56)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--times", type=float, default=4.0, help="unsharded state over a rank's limit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from offload_memory import train  # ranks import it by this name, not from __main__

    config, topology = run_config(args.layers, args.hidden, args.dp), Topology(1, 1, args.dp)
    ranks, longest = RankPool(), 1500.0
    plain = ranks.run(args.dp, train, config, topology, 0, timeout=longest, fresh=True)
    state = STATE_BYTES * plain[0]["parameters"]
    limit = int(state / args.times)
    with tempfile.TemporaryDirectory() as folder:
        other = offloaded(config, folder, optimizer="nvme")
        found = ranks.run(args.dp, train, other, topology, limit, timeout=longest, fresh=True)
    try:
        ranks.run(args.dp, train, config, topology, limit, timeout=longest, fresh=True)
        refused = ""
    except RankFailed as error:
        refused = error.error_type
        if "can't allocate memory" not in str(error) and refused != "MemoryError":
            raise
    ranks.close()
    equal = all(a["steps"] == b["steps"] for a, b in zip(plain, found))
    row = {
        "parameters": plain[0]["parameters"], "state_bytes": state, "limit_bytes": limit, "ranks": args.dp,
        "steps": STEPS, "losses": [step[0] for step in plain[0]["steps"]], "equal_to_the_bit": equal,
        "private_bytes": {"without": max(r["data"] for r in plain), "with": max(r["data"] for r in found),
                          "before_training": max(r["before"] for r in found)},
        "peak_rss": {"without": max(r["peak_rss"] for r in plain), "with": max(r["peak_rss"] for r in found)},
        "without_offload_under_the_limit": refused,
    }
    print(json.dumps(row, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(row, indent=1) + "\n")
    return 0 if equal and refused else 1


if __name__ == "__main__":
    sys.exit(main())
