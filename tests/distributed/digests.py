"""Digests of what every layout computes, to show that a refactoring changes no number.

Run before and after with ``python tests/distributed/digests.py --out FILE`` (resumable), then compare the two files
with ``--compare BEFORE AFTER``. A digest is SHA-256 of all losses, norms, gradients and weights of all ranks; shorter
ones of each of these tell what of a draw changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cases import run_cases
from drawing import OPS, Draw, before_stage_3, draw
from matrix import matrix, schedule_matrix
from pool import RankPool

from megatron_port.config.offload import OffloadConfig
from megatron_port.config.schema import RunConfig


def feed(digest: Any, value: Any) -> None:
    """Add a value, and all that it holds, to a digest."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (list, tuple)):
        for item in value:
            feed(digest, item)
    elif hasattr(value, "__dict__"):
        for name in sorted(vars(value)):
            feed(digest, getattr(value, name))
    else:
        digest.update(repr(value).encode())


def traces_digest(traces: Sequence[Any]) -> str:
    """Of the records of all ranks of a run."""
    digest = hashlib.sha256()
    feed(digest, list(traces))
    return digest.hexdigest()


def part_digests(traces: Sequence[Any]) -> dict[str, str]:
    """Return 16 hexadecimal digits for each field of the records, over all ranks."""
    out = {}
    for name in sorted(vars(traces[0])):
        digest = hashlib.sha256()
        feed(digest, [getattr(trace, name) for trace in traces])
        out[name] = digest.hexdigest()[:16]
    return out


def as_before(one: Draw) -> Draw:
    """The draw without the options that commits before 2026-11-22 did not have."""
    later: dict[str, dict[str, Any]] = {
        "model": {"qk_norm": False}, "layout": {"shard_size": 0, "reshard": "forward"},
    }
    if one.config.layout.zero_stage == 3:
        later["layout"]["zero_stage"] = before_stage_3(one.config.layout)
    parts = {name: getattr(one.config, name) for name in later}
    known = {name: {k: v for k, v in later[name].items() if hasattr(part, k)} for name, part in parts.items()}
    changes: dict[str, Any] = {name: dataclasses.replace(part, **known[name]) for name, part in parts.items()}
    config = without_offload(dataclasses.replace(one.config, **changes))
    return dataclasses.replace(one, config=config)


def without_offload(config: RunConfig) -> RunConfig:
    """The draw as it was before some had their state offloaded, which changes no number but takes the own kernel."""
    if config.offload.optimizer == "none":
        return config
    backend = dataclasses.replace(config.backend, optimizer="auto")
    if backend.own_kernels == "auto":
        ops: dict[str, Any] = dict.fromkeys(OPS, "auto")
        backend = dataclasses.replace(backend, own_kernels="off", **ops)
    return dataclasses.replace(config, backend=backend, offload=OffloadConfig())


def run(draws: Sequence[tuple[str, Draw]], out: Path, *, batch_size: int, seconds: float) -> None:
    """Append a line for each draw that ``out`` lacks."""
    done = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set()
    groups: dict[tuple[int, bool], list[tuple[str, Draw]]] = {}
    for name, one in draws:
        if name not in done:
            groups.setdefault((one.topology.world_size, one.config.engine == "deepspeed"), []).append((name, one))
    ranks, started = RankPool(), time.monotonic()
    try:
        for (world, deepspeed), members in sorted(groups.items()):
            for at in range(0, len(members), batch_size):
                if time.monotonic() - started > seconds:
                    return
                batch = members[at : at + batch_size]
                results = ranks.run(world, run_cases, [one.case for _, one in batch], timeout=60 + 30 * len(batch),
                                    deepspeed=deepspeed)
                with out.open("a") as file:
                    for i, (name, one) in enumerate(batch):
                        traces = [r[i] for r in results]
                        row = {"name": name, **one.describe(), "digest": traces_digest(traces),
                               "parts": part_digests(traces)}
                        file.write(json.dumps(row) + "\n")
    finally:
        ranks.close()


def compare(before: Path, after: Path) -> int:
    """Print the draws whose digests differ; 1 if there are any, or none in common."""
    old, new = ({r["name"]: r for r in map(json.loads, p.read_text().splitlines())} for p in (before, after))
    common = [name for name in old if name in new]
    differ = [name for name in common if old[name]["digest"] != new[name]["digest"]]
    for name in differ:
        parts = [old[name].get("parts", {}), new[name].get("parts", {})]
        changed = sorted(k for k in parts[0].keys() & parts[1].keys() if parts[0][k] != parts[1][k])
        config = {k: v for k, v in new[name].items() if k not in ("name", "digest", "parts")}
        print(name, f"differs in {', '.join(changed)}:" if changed else "", json.dumps(config))
    print(f"{len(common)} compared, {len(differ)} differ")
    return 1 if differ or not common else 0


def main() -> int:
    """Write or compare digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--seeds", type=int, default=1000, help="random draws")
    parser.add_argument("--matrix", action="store_true", help="the rows of both matrices as well")
    parser.add_argument("--only", default="", metavar="REGEX", help="of these, those whose name matches from its start")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    if args.compare:
        return compare(*args.compare)
    draws = [(f"draw {seed}", as_before(draw(seed))) for seed in range(args.seeds)]
    if args.matrix:
        for own in ("off", "on"):
            rows = [*matrix(own), *schedule_matrix(own_kernels=own)]
            draws += [(f"matrix {own} {i}", one) for i, one in enumerate(rows)]
    draws = [(name, one) for name, one in draws if re.match(args.only, name)]
    run(draws, args.out, batch_size=args.batch, seconds=args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
