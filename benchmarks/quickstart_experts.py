"""Losses of the quick start with experts beside those of its dense twin, as a picture.

``python benchmarks/quickstart_experts.py`` reads both runs' metrics.jsonl and writes docs/images/quickstart-moe.svg.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_port.core.io.files import write_text
from megatron_port.tools.charts.page import Axis, Series, line_chart, standalone
from megatron_port.tools.report.picture import read_curves, smoothed

ROOT = Path(__file__).resolve().parents[1]
RUNS = {"experts": "quickstart-moe", "dense": "quickstart-moe-dense"}
FIRST, WINDOW = 30, 11
"""Steps that are left out, which would make the rest flat; a mean's steps."""


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=Path, nargs=2, default=[ROOT / "runs" / name for name in RUNS.values()])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "quickstart-moe.svg")
    args = parser.parse_args()
    series = []
    for colour, (name, folder) in enumerate(zip(RUNS, args.runs, strict=True)):
        curves = read_curves(folder / "metrics.jsonl")
        steps = sorted(curves.training)
        mean = smoothed([curves.training[step] for step in steps], WINDOW)
        points = [(float(step), value) for step, value in zip(steps, mean, strict=True) if step >= FIRST]
        found = [(float(step), value) for step, value in sorted(curves.validation.items()) if step >= FIRST]
        series += [Series(f"{name}, training (mean of {WINDOW} steps)", points, colour),
                   Series(f"{name}, validation", found, colour, joined=False)]
    title = "The quick start with 8 experts, 2 for a token, and as wide without"
    write_text(args.out, standalone(line_chart(
        series, label=title, title=title, width=800, height=400, x=Axis("step of 4,096 tokens"),
        y=Axis("loss (nats per byte)", log=0),
    )))


if __name__ == "__main__":
    main()
