"""Digests of what layouts compute, to show that a change of structure changed no bit.

``python tests/distributed/digests.py --out FILE`` trains every layout of the matrices and random draws, and writes a
SHA-256 of each run's losses, gradient norms, gradients and weights. ``--compare OLD NEW`` names the rows that differ.
Digests depend on the machine: make both files on the same one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import records
from cases import digest_cases
from drawing import Draw, draw
from fuzz import seed_range
from matrix import matrix, replica_matrix, schedule_matrix, zero3_matrix
from pool import RankPool


def rows(every: int, seeds: Sequence[int]) -> list[tuple[str, Draw]]:
    """Return the runs by name: each ``every``-th of the matrices, and the random draws of ``seeds``."""
    kinds = {
        "matrix": matrix(), "own kernels": matrix("on"), "schedules": schedule_matrix(), "replicas": replica_matrix(),
        "zero3": zero3_matrix(),
    }
    out = [(f"{kind} {one.seed}", one) for kind, draws in kinds.items() for one in draws[::every]]
    return out + [(f"draw {seed}", draw(seed)) for seed in seeds]


def record(every: int, seeds: Sequence[int], path: Path, batch: int) -> int:
    """Write the digests that ``path`` lacks, a batch at a time. Returns the exit code."""
    done = {json.loads(line)["row"] for line in path.read_text().splitlines()} if path.exists() else set()
    groups: dict[tuple[int, bool], list[tuple[str, Draw]]] = {}
    for name, one in rows(every, seeds):
        if name not in done:
            key = one.topology.world_size, one.config.engine == "deepspeed"
            groups.setdefault(key, []).append((name, one))
    ranks, here = RankPool(), records.commit()
    try:
        for (world, deepspeed), members in sorted(groups.items()):
            for part in (members[i : i + batch] for i in range(0, len(members), batch)):
                found = ranks.run(
                    world, digest_cases, [one.case for _, one in part], timeout=60.0 + 60.0 * len(part),
                    deepspeed=deepspeed,
                )
                with path.open("a") as out:
                    for (name, _), digests in zip(part, zip(*found)):
                        out.write(json.dumps({"row": name, "commit": here, "ranks": list(digests)}) + "\n")
    finally:
        ranks.close()
    return 0


def compare(old: Path, new: Path) -> int:
    """Print the rows that both files have and that differ. Returns 1 if there is one, or nothing to compare."""
    a, b = ({row["row"]: row["ranks"] for row in map(json.loads, path.read_text().splitlines())} for path in (old, new))
    both = sorted(a.keys() & b.keys())
    different = [name for name in both if a[name] != b[name]]
    print(f"{len(both)} rows in both files, {len(different)} differ", *different, sep="\n")
    return 1 if different or not both else 0


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--every", type=int, default=1, help="take each so manieth row of the matrices")
    parser.add_argument("--seeds", type=seed_range, default=[], help="random draws too, e.g. 0-99")
    parser.add_argument("--batch", type=int, default=20)
    args = parser.parse_args()
    if args.compare:
        return compare(*args.compare)
    if args.out is None:
        parser.error("give --out FILE or --compare OLD NEW")
    return record(args.every, args.seeds, args.out, args.batch)


if __name__ == "__main__":
    sys.exit(main())
