"""Launches of one layer and one micro-batch on the ghost machine, by kernel.

    python tests/ghost/layer_launches.py --python ENV/bin/python [--size gpt2-124m]

A step of L layers and M micro-batches launches a + b L + c M + d L M kernels; d, what a layer costs in each
micro-batch, is the difference of differences of four runs: (L, M), (L + 1, M), (L, M + 1), (L + 1, M + 1). Every
kernel's name is counted by itself. What is launched once a step (clearing sums, the update) is in b and drops out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]


from environment import find_torch, make_environment  # noqa: E402
from libraries import build, build_kernels  # noqa: E402
from machine import Machine, RankLog  # noqa: E402
from ordering import STEP_BEGINS, STEP_ENDS  # noqa: E402

LAYERS, MICRO_BATCHES, MICRO_BATCH = (2, 3), (2, 3), 2
KINDS = ("kernel", "product", "copy", "fill")


def launches(log: RankLog) -> Counter[str]:
    """Return the launches of the last step by name: of a kernel its mangled one, else the kind of the call."""
    marks = [event.detail if event.kind == "mark" else "" for event in log.events]
    step = log.events[marks.index(STEP_BEGINS):marks.index(STEP_ENDS)]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="of an environment with the CUDA build of torch; none: one is made")
    parser.add_argument("--size", default="gpt2-124m", help="of benchmarks/compare")
    a = parser.parse_args()
    torch = find_torch(a.python.absolute() if a.python else make_environment(ROOT))
    runs: dict[tuple[int, int], Counter[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(torch.python, Path(scratch) / "built", Path(scratch), devices=1)
        build(torch.libraries, machine.built)
        if problem := build_kernels(ROOT, machine.built):
            print(f"error: the launches are those of the own kernels: {problem}", file=sys.stderr)
            return 3
        for layers, count in itertools.product(LAYERS, MICRO_BATCHES):
            code, output, logs = machine.run_script(
                HERE / "budget_step.py", a.size, str(layers), str(MICRO_BATCH), str(MICRO_BATCH * count), seconds=600.0
            )
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
