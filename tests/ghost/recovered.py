"""Lose ranks "on CUDA": communicators are aborted and made anew, and the run is bit for bit the unbroken one.

    python tests/ghost/recovered.py [--python ENV/bin/python] [--faults 10] [--captured]

Four ranks (tp 2 x dp 2) over the real ProcessGroupNCCL, with numbers. Ranks are killed while they train; the others
must leave NCCL, keep their processes, and continue. Exit 1: a loss differs, a rank that lived was replaced, or the
device memory of the ranks that lived has grown.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from computed import RECORDED, RUN
from options import ROOT, chosen_torch, machine, parser

sys.path.insert(0, str(ROOT / "tests" / "faults"))
from fault_moments import moment, struck, write_moments

DRIVER = """
import sys
sys.path.insert(0, {hook!r})
import faults_at_moments
from megatron_port.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def rows(folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps."""
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in row]


def main() -> int:
    """Run both, compare."""
    options = parser(__doc__ or "")
    options.add_argument("--faults", type=int, default=10)
    options.add_argument("--captured", action="store_true", help="steps are captured, and again after each recovery")
    args = options.parse_args()
    apart = 7 if args.captured else 2  # steps are captured from the fourth on
    wrong: list[str] = []
    with machine(chosen_torch(args.python)) as ghost:
        text = RUN.format(name="run", layers=2, dtype="bf16").replace("enabled = false", "enabled = true")
        (ghost.scratch / "run.toml").write_text(text)
        sets = ("layout.tensor_parallel_size=2", f"training.steps={apart * args.faults + 4 + apart}",
                "checkpoint.save_final=false", *([RECORDED] if args.captured else []))
        words = ["train", "run.toml", "--nproc", "4", *(word for one in sets for word in ("--set", one))]
        code, output, _ = ghost.compute(*words)
        if code:
            print(output[-3000:])
            return 1
        unbroken = rows(ghost.scratch / "runs" / "run")
        # While a captured step is replayed, nobody tells of its phases.
        phases = ("data",) if args.captured else ("forward", "backward", "reduce", "optimizer")
        moments = [
            moment(n % 3 + 1, apart * (n + 1), phases[n % len(phases)], scope="step") for n in range(args.faults)
        ]
        hook = write_moments(ghost.scratch / "hook", moments)
        (ghost.scratch / "driver.py").write_text(DRIVER.format(hook=str(hook)))
        memory = ghost.scratch / "memory"
        memory.mkdir()
        more = ('launch.when_lost="replace"', "checkpoint.memory_interval=1", "name=broken",
                f'checkpoint.memory_folder="{memory}"')
        ended = ghost.start(str(ghost.scratch / "driver.py"), *words, *(w for one in more for w in ("--set", one)),
                            settings={"GHOST_COMPUTE": "1"}, seconds=600)
        output = ended.output
        if ended.code or struck(hook) != len(moments):
            print(output[-6000:])
            wrong.append(f"exit code {ended.code}, {struck(hook)} of {len(moments)} faults")
        broken = rows(ghost.scratch / "runs" / "broken")
    said = r"^recovery \d+: (.*); ranks that keep their processes: (\d), that are started again: (\d)"
    recoveries = re.findall(said, output, re.M)
    wrong += [f"recovery after {why}: {again} ranks were started again" for why, _, again in recoveries if again != "1"]
    for a, b in zip(unbroken, broken, strict=False):
        if (a["step"], a["loss"], a["grad_norm"]) != (b["step"], b["loss"], b["grad_norm"]):
            wrong.append(f"step {a['step']}: {a['loss']} and {b['loss']}")
    if len(unbroken) != len(broken):
        wrong.append(f"{len(unbroken)} and {len(broken)} steps")
    peaks = [row["memory_bytes"] for row in broken if "memory_bytes" in row]
    after = re.findall(r"training continues at step (\d+), ([\d.]+) s", output)
    print(f"{len(recoveries)} recoveries, {[float(seconds) for _, seconds in after]} s; peak of rank 0's device memory "
          f"{peaks[0] if peaks else '?'} at first, {peaks[-1] if peaks else '?'} at last")
    if peaks and max(peaks) > peaks[3]:
        wrong.append(f"device memory has grown from {peaks[3]} to {max(peaks)} bytes")
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
