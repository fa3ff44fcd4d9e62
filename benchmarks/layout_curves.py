"""Losses of the quick start's model on several layouts, for the picture on the front page.

``python benchmarks/layout_curves.py --out benchmarks/results/layout-curves.jsonl`` trains every layout below on the
quick start's corpus (``make quickstart`` fetches it) and writes one line for each: its settings and the loss of every
step. A layout that the file already has is not trained again. ``scripts/docs_pictures.py`` draws
docs/images/layouts.svg from the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_port.tools.report.picture import read_curves

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Layout:
    """One run: its name in the picture, its processes, and what it changes of runs/quickstart."""

    name: str
    ranks: int
    changes: tuple[str, ...]


def sizes(tensor: int, pipeline: int, data: int, *more: str) -> tuple[str, ...]:
    """The overrides of a layout; ``more``: further ones, without the ``layout.`` in front."""
    given = (f"tensor_parallel_size={tensor}", f"pipeline_parallel_size={pipeline}", f"data_parallel_size={data}")
    return tuple(f"layout.{change}" for change in (*given, *more))


LAYOUTS = (
    Layout("one process", 1, ("engine=native", *sizes(1, 1, 1))),
    Layout("tp 2 × pp 2 × dp 2, DeepSpeed", 8, sizes(2, 2, 2)),
    Layout("tp 4 with sequence parallelism", 4, ("engine=native", *sizes(4, 1, 1, "sequence_parallel=true"))),
    Layout("pp 4, zero bubble", 4, ("engine=native", *sizes(1, 4, 1, "pipeline_schedule=zb-h1"))),
    Layout("dp 4, ZeRO-3", 4, ("engine=native", *sizes(1, 1, 4, "zero_stage=3"))),
    Layout("cp 4", 4, ("engine=native", *sizes(1, 1, 1, "context_parallel_size=4"))),
)


def train(layout: Layout, folder: Path, steps: int) -> dict[int, float]:
    """Train one layout; the loss of each step."""
    changes = ("name=run", f"output_dir={folder}", f"training.steps={steps}", "training.eval_interval=0",
               "checkpoint.save_interval=0", "watch.hang_seconds=300", *layout.changes)
    subprocess.run(
        [sys.executable, "-m", "megatron_port", "train", "runs/quickstart", "--nproc", str(layout.ranks),
         *[word for change in changes for word in ("--set", change)]],
        cwd=ROOT, check=True,
    )
    return read_curves(folder / "run" / "metrics.jsonl").training


def main() -> None:
    """Train the layouts that the record does not have."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "layout-curves.jsonl")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    done = {json.loads(line)["layout"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    for layout in LAYOUTS:
        if layout.name in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            losses = train(layout, Path(folder), args.steps)
        row = {"layout": layout.name, "ranks": layout.ranks, "changes": list(layout.changes),
               "losses": [losses[step] for step in sorted(losses)]}
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
