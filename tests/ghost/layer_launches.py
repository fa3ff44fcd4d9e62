"""Launches of one layer and one micro-batch on the ghost machine, by kernel.

    python tests/ghost/layer_launches.py --python ENV/bin/python [--size gpt2-124m]

A step of L layers and M micro-batches launches a + b L + c M + d L M kernels; d, what a layer costs in each
micro-batch, is the difference of differences of four runs: (L, M), (L + 1, M), (L, M + 1), (L + 1, M + 1). Every
kernel's name is counted by itself. What is launched once a step (clearing sums, the update) is in b and drops out.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter

from machine import RankLog
from options import HERE, chosen_torch, machine, parser
from ordering import STEP_BEGINS, STEP_ENDS, between

LAYERS, MICRO_BATCHES, MICRO_BATCH = (2, 3), (2, 3), 2
KINDS = ("kernel", "product", "copy", "fill")


def launches(log: RankLog) -> Counter[str]:
    """Return the launches of the last step by name: of a kernel its mangled one, else the kind of the call."""
    step = between(log, STEP_BEGINS, STEP_ENDS)
    # A kernel's detail: grid, block, shared memory, stream flag, name.
    return Counter(e.detail.split(" ", 3)[-1] if e.kind == "kernel" else e.kind for e in step if e.kind in KINDS)


def of_one_layer(runs: dict[tuple[int, int], Counter[str]]) -> dict[str, int]:
    """Return the launches by name of one layer and one micro-batch, from runs by (layers, micro-batches).

    ``runs`` has two neighbouring numbers of each.
    """
    (a, b), (m, n) = (sorted({key[i] for key in runs}) for i in (0, 1))
    names = set().union(*runs.values())
    found = {name: runs[b, n][name] - runs[a, n][name] - runs[b, m][name] + runs[a, m][name] for name in names}
    return {name: count for name, count in found.items() if count}


def readable(names: list[str]) -> list[str]:
    """Return the demangled names without their arguments and the longest template lists."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [re.sub(r"\((?!anonymous)[^()]*\)$", "", line)[:150] for line in done.stdout.splitlines()]


def main() -> int:
    """Run the four cases and print the table as text and the total as JSON."""
    made = parser(__doc__)
    made.add_argument("--size", default="gpt2-124m", help="of benchmarks/compare")
    a = made.parse_args()
    torch = chosen_torch(a.python)
    runs: dict[tuple[int, int], Counter[str]] = {}
    with machine(torch, devices=1) as node:
        for layers, count in itertools.product(LAYERS, MICRO_BATCHES):
            sizes = map(str, (layers, MICRO_BATCH, MICRO_BATCH * count))
            code, output, logs = node.start(str(HERE / "budget_step.py"), a.size, *sizes, seconds=600.0)
            if code or len(logs) != 1:
                print(f"error: exit {code}: {output[-1000:]}", file=sys.stderr)
                return 1
            runs[layers, count] = launches(logs[0])
    found = of_one_layer(runs)
    names = sorted(found, key=lambda name: (-found[name], name))
    for name, text in zip(names, readable(names)):
        print(f"{found[name]:4d}  {text}")
    print(json.dumps({"size": a.size, "torch": torch.version, "launches": sum(found.values())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
