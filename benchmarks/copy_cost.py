"""Cost of copies of the state (``checkpoint.memory_interval``) at the quick start's shape, by a run that alternates.

    python benchmarks/copy_cost.py [--steps N] [--disk] [--set …]

Every second step is copied. A step with a copy is compared with its neighbours without: wall time, in which eight ranks
share this machine's cores, and the processor time of the copy itself beside that of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SKIPPED, PART = 20, 40
"""Steps of the beginning, whose pages are new; steps of a part of the run, whose ratios give the error."""


def watched(folder: Path) -> None:
    """Have each rank write the times of its steps: [step, wall seconds, processor seconds, those of the copy]."""
    from megatron_port.run.copying import StateCopying

    after, act, close = StateCopying.after_step, StateCopying.act, StateCopying.close
    rows: list[list[float]] = []

    def after_step(self: Any, taken: Any) -> None:
        after(self, taken)
        rows.append([taken.step, time.perf_counter(), time.process_time(), 0.0])

    def timed_act(self: Any) -> None:
        begun = time.process_time()
        act(self)
        rows[-1][3] = time.process_time() - begun

    def closed(self: Any, ending: Any) -> None:
        close(self, ending)
        (folder / f"{self.state.session.info.rank}.json").write_text(json.dumps(rows))

    StateCopying.after_step, StateCopying.act, StateCopying.close = after_step, timed_act, closed  # type: ignore[method-assign]
    StateCopying.due = lambda self, step: step > 0 and step % 2 == 0  # type: ignore[method-assign]


def compare(folder: Path) -> dict[str, Any]:
    """Return the medians over steps, and the ratios over ranks."""
    ranks, parts = [], []
    for path in sorted(folder.glob("[0-9]*.json"), key=lambda path: int(path.stem)):
        rows = json.loads(path.read_text())
        pairs = [(a[0] % 2 == 0, b[1] - a[1], b[2] - a[2], a[3])
                 for a, b in zip(rows, rows[1:], strict=False) if a[0] > SKIPPED]
        wall = {on: statistics.median(w for copied, w, _, _ in pairs if copied is on) for on in (True, False)}
        step = statistics.median(cpu for copied, _, cpu, _ in pairs if not copied)
        copy = statistics.median(c for copied, _, _, c in pairs if copied)
        parts = [statistics.median(w for copied, w, _, _ in part if copied)
                 / statistics.median(w for copied, w, _, _ in part if not copied) - 1
                 for part in (pairs[k : k + PART] for k in range(0, len(pairs) - PART + 1, PART))]
        ranks.append({"wall_with": wall[True], "wall_without": wall[False], "step_cpu": step, "copy_cpu": copy})
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return {
        "ranks": len(ranks), "step_ms": 1e3 * total["wall_without"] / len(ranks),
        "wall_ratio": total["wall_with"] / total["wall_without"] - 1,
        "wall_ratio_error": statistics.stdev(parts) / len(parts) ** 0.5 if len(parts) > 1 else None,  # of one rank
        "copy_cpu_ms": [round(1e3 * rank["copy_cpu"], 2) for rank in ranks],
        "step_cpu_ms": [round(1e3 * rank["step_cpu"], 1) for rank in ranks],
        "cpu_ratio": total["copy_cpu"] / total["step_cpu"],
        "copy_share_of_the_wall": total["copy_cpu"] / (os.cpu_count() or 1) / (total["wall_without"] / len(ranks)),
    }


def main() -> int:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--disk", action="store_true", help="write every tenth step's copy to the disk as well")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    from megatron_port.cli.main import main as megatron_port

    with tempfile.TemporaryDirectory() as home:
        watched(Path(home))
        sets = ["data.synthetic=true", "data.train=[]", f"training.steps={args.steps}", "training.eval_interval=0",
                "checkpoint.save_interval=0", "checkpoint.save_final=false", "checkpoint.memory_interval=1",
                "launch.when_lost=replace", f"output_dir={home}/runs", "training.log_interval=100", *args.set]
        if args.disk:
            (Path(home) / "disk").mkdir()
            sets += [f"checkpoint.disk_folder={home}/disk", "checkpoint.disk_interval=10"]
        words = ["train", "runs/quickstart", "--nproc", "8", *(word for one in sets for word in ("--set", one))]
        parent, load = os.getpid(), os.getloadavg()[0]
        code = megatron_port(words)
        if os.getpid() != parent:  # a rank
            os._exit(code)
        print(json.dumps({"load_before": load, "load_after": os.getloadavg()[0], "exit_code": code,
                          **compare(Path(home))}))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
