"""Draw the pictures of README and docs/ from records and from the layouts that they explain.

``python scripts/docs_pictures.py`` writes docs/images/*.svg: ``layouts`` from benchmarks/results/layout-curves.jsonl,
``planned`` from benchmarks/results/plan-accuracy.md, ``optimizers`` from benchmarks/results/optimizer-curves.jsonl, and
one picture for each kind of parallelism. A picture whose record is missing is left as it is. tests/unit/test_docs.py
compares the files with what this script draws.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_port.tools.charts.page import (  # noqa: E402  # noqa: E402
    COLOURS,
    Axis,
    Series,
    colour,
    drawing,
    legend,
    line,
    line_chart,
    rectangle,
    standalone,
    text,
)

IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 760
PALE = 'opacity="0.35"'


def block(x: float, y: float, wide: float, tall: float, name: str, fill: str, more: str = PALE) -> list[str]:
    """A tinted rectangle with a frame and its name in the middle."""
    return [rectangle(x, y, wide, tall, fill, more=more),
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" style="fill:none;stroke:{fill}"/>',
            text(x + wide / 2, y + tall / 2 + 4, name, anchor="middle", kind="small")]


def arrow(x1: float, y1: float, x2: float, y2: float) -> list[str]:
    """A line with a head at its end."""
    angle = math.atan2(y2 - y1, x2 - x1)
    tips = [(x2 - 7 * math.cos(angle + turn), y2 - 7 * math.sin(angle + turn)) for turn in (0.45, -0.45)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x2, y2), *tips))
    return [line(x1, y1, x2, y2, "frame"), f'<polygon points="{points}" style="fill:var(--ink)"/>']


def titled(title: str, height: float, parts: Sequence[str]) -> str:
    """The picture as a file, with its title at the top."""
    return standalone(drawing(WIDTH, height, [text(16, 24, title, kind="strong"), *parts], title))


def tensor() -> str:
    """An MLP on two tensor-parallel ranks."""
    out: list[str] = []
    for rank in (0, 1):
        y, ink = 44 + 92 * rank, colour(rank)
        out += [text(16, y + 38, f"tp {rank}", kind="strong")]
        out += block(70, y, 96, 70, "input: all of it", "var(--total)")
        out += arrow(168, y + 35, 196, y + 35)
        out += block(198, y, 126, 70, f"up: columns {'0 … n/2' if rank == 0 else 'n/2 … n'}", ink)
        out += arrow(326, y + 35, 354, y + 35)
        out += block(356, y, 84, 70, "activation", ink)
        out += arrow(442, y + 35, 470, y + 35)
        out += block(472, y, 126, 70, f"down: rows {'0 … n/2' if rank == 0 else 'n/2 … n'}", ink)
        out += arrow(600, y + 35, 652, 124 + (-18 if rank == 0 else 18))
    out += block(654, 84, 92, 80, "all-reduce", "var(--good)")
    out += [text(70, 252, "Nothing is exchanged between up and down; one sum follows in the forward pass and one in "
                 "the backward pass.", kind="small")]
    return titled("Tensor parallelism: each matrix is split, and one all-reduce ends the block", 268, out)


def sequence() -> str:
    """Which ranks hold which part, in turn, under sequence parallelism."""
    parts = [("norm", "positions", True), ("all-gather", "", False), ("attention", "heads", True),
             ("reduce-scatter", "", False), ("dropout, norm", "positions", True), ("all-gather", "", False),
             ("MLP", "columns, rows", True)]
    out: list[str] = []
    for rank in (0, 1):
        out += [text(16, 80 + 56 * rank, f"tp {rank}", kind="strong")]
    x = 60.0
    for name, how, split in parts:
        wide = 98.0 if split else 82.0
        if split:
            for rank in (0, 1):
                out += block(x, 52 + 56 * rank, wide, 48, name, colour(rank))
            out += [text(x + wide / 2, 176, f"split by {how}", anchor="middle", kind="small")]
        else:
            out += block(x, 52, wide, 104, name, "var(--good)")
        x += wide + 5
    out += [text(60, 202, "Same bytes as tensor parallelism alone, and 1/tp of the activations between the blocks.",
                 kind="small")]
    return titled("Sequence parallelism: what tensor parallelism leaves whole is split by positions", 218, out)


def zero() -> str:
    """Bytes per parameter of four replicas under each ZeRO stage, in bf16 with fp32 gradient sums."""
    kinds = (("weights", 2, 0), ("gradient sums", 4, 1), ("master and moments", 12, 2))
    divided_from = {0: 3, 1: 2, 2: 1}
    out: list[str] = []
    scale, replicas = 26.0, 4
    for stage in range(4):
        y = 46 + 44 * stage
        out += [text(16, y + 20, f"ZeRO-{stage}", kind="strong")]
        x = 90.0
        total = 0.0
        for index, (_, size, tint) in enumerate(kinds):
            held = size / replicas if stage >= divided_from[index] else size
            out += [rectangle(x, y, held * scale, 30, colour(tint))]
            x, total = x + held * scale, total + held
        out += [text(x + 8, y + 20, f"{total:g} bytes per parameter and rank", kind="small")]
    swatches, _ = legend(90, 242, [(f"{name}: {size} bytes", colour(tint)) for name, size, tint in kinds], 640)
    return titled("Data parallelism with ZeRO: what each of 4 replicas holds (bf16, native engine)", 258,
                  [*out, swatches])


def context() -> str:
    """Sixteen positions on four context-parallel ranks in zigzag order."""
    owners = [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]
    out: list[str] = [text(16, 70, "positions", kind="strong")]
    for position, rank in enumerate(owners):
        out += block(80 + 40 * position, 48, 36, 34, str(position), colour(rank))
    for rank in range(4):
        y = 104 + 36 * rank
        out += [text(16, y + 20, f"cp {rank}", kind="strong")]
        mine = [p for p, owner in enumerate(owners) if owner == rank]
        for position in range(16):
            seen = sum(q >= position for q in mine)
            if seen:
                shade = f'opacity="{0.15 + 0.2 * seen:.2f}"'
                out += [rectangle(80 + 40 * position, y, 36, 28, colour(rank), more=shade)]
        keys = sum(q + 1 for q in mine)
        out += [text(748, y + 19, f"{keys}", anchor="end", kind="small")]
    out += [text(748, 98, "scores", anchor="end", kind="small"),
            text(80, 262, "Keys that each rank's queries see, darker where more do: zigzag gives every rank 34 scores.",
                 kind="small")]
    return titled("Context parallelism: each rank holds some positions, and queries see keys of other ranks", 278, out)


def expert() -> str:
    """Two ranks that exchange the tokens of four experts."""
    out: list[str] = []
    for rank in (0, 1):
        y, ink = 48 + 108 * rank, colour(rank)
        out += [text(16, y + 44, f"ep {rank}", kind="strong")]
        out += block(70, y, 110, 80, "tokens, router", ink)
        out += block(410, y, 88, 36, f"expert {2 * rank}", ink)
        out += block(410, y + 44, 88, 36, f"expert {2 * rank + 1}", ink)
        out += block(650, y, 96, 80, "weighted sum", ink)
    out += block(214, 48, 120, 188, "all-to-all", "var(--good)") + block(530, 48, 88, 188, "all-to-all", "var(--good)")
    for y in (88, 196):
        out += arrow(182, y, 212, y) + arrow(336, y, 408, y) + arrow(500, y, 528, y) + arrow(620, y, 648, y)
    out += [text(70, 262, "Each token visits the k experts that the router chose, wherever they are, and its results "
                 "return to its own rank.", kind="small")]
    return titled("Expert parallelism: ranks hold different experts and exchange tokens", 278, out)


def pipeline() -> str:
    """1F1B of four stages and eight micro-batches, from the schedule that the engine runs."""
    stages, batches, unit = 4, 8, 20.0
    done: dict[tuple[str, int, int], float] = {}
    todo = {s: one_f_one_b(s, stages, batches) for s in range(stages)}
    free = [0.0] * stages
    out: list[str] = []
    while any(todo.values()):
        for stage, passes in todo.items():
            while passes:
                kind, batch = passes[0]
                if kind == "F":
                    ready = 0.0 if stage == 0 else done.get(("F", batch, stage - 1))
                else:
                    ready = done.get(("F", batch, stage)) if stage == stages - 1 else done.get(("B", batch, stage + 1))
                if ready is None:
                    break
                start = max(free[stage], ready)
                long = 1.0 if kind == "F" else 2.0
                free[stage] = done[kind, batch, stage] = start + long
                ink = colour(0 if kind == "F" else 1)
                out += block(90 + start * unit, 46 + 40 * stage, long * unit, 32, str(batch), ink)
                passes.pop(0)
    for stage in range(stages):
        out += [text(16, 66 + 40 * stage, f"stage {stage}", kind="strong")]
    swatches, _ = legend(90, 226, [("forward pass of a micro-batch", colour(0)), ("backward pass", colour(1))], 600)
    return titled("Pipeline parallelism: stages work on different micro-batches (1F1B)", 242, [*out, swatches])


def one_f_one_b(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """Passes of one stage: warm-up, one forward and one backward in turn, then the rest."""
    from megatron_port.core.pipeline.schedules import one_f_one_b as schedule

    return [(action.kind.name[0], action.micro_batch) for action in schedule(stage, stages, batches)]


def layouts() -> str | None:
    """Losses of the recorded layouts, drawn over one another."""
    record = RESULTS / "layout-curves.jsonl"
    if not record.exists():
        return None
    runs = [json.loads(row) for row in record.read_text().splitlines()]
    series = [
        Series(f"{run['layout']} ({run['ranks']} process{'es' if run['ranks'] > 1 else ''})",
               [(float(i + 1), loss) for i, loss in enumerate(run["losses"])], number, dashed=number > 0)
        for number, run in enumerate(runs)
    ]
    reference = runs[0]["losses"]
    apart = [[abs(a / b - 1) for a, b in zip(run["losses"], reference, strict=True)] for run in runs[1:]]
    title = f"One run on {len(runs)} layouts, {len(reference)} steps in fp32"
    curves = line_chart(series, label=title, title=title, width=800, height=230, x=Axis("step of 4,096 tokens"),
                        y=Axis("loss (nats per byte)", log=0))
    distances = line_chart(
        [Series(run["layout"], [(float(i + 1), max(d, 1e-9)) for i, d in enumerate(distance)], number + 1)
         for number, (run, distance) in enumerate(zip(runs[1:], apart, strict=True))],
        label="distance of each layout's loss from that of one process", width=800, height=150,
        x=Axis(f"their relative distance from one process: at most {max(map(max, apart)):.0e}", form=lambda _: ""),
        y=Axis("distance", form=lambda v: f"{v:.0e}", log=10),
    )
    return standalone(stacked([curves, distances], title), themed=True)


def stacked(charts: Sequence[str], label: str) -> str:
    """Charts below one another in one drawing."""
    out, top, wide = [], 0.0, 0.0
    for chart in charts:
        _, _, width, height = (float(x) for x in re.findall(r"[\d.]+", chart.split('viewBox="')[1].split('"')[0]))
        out.append(chart.replace("<svg ", f'<svg x="0" y="{top:g}" width="{width:g}" height="{height:g}" ', 1))
        top, wide = top + height + 6, max(wide, width)
    return drawing(wide, top, out, label)


def planned() -> str | None:
    """Seconds per step, planned over published, of every published step."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in (RESULTS / "plan-accuracy.md").read_text().split("## Rows", 1)[1].splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) == 10 and re.fullmatch(r"\d+", cells[0]):
            found.setdefault(cells[1], []).append((math.log10(float(cells[6])), math.log10(float(cells[7]))))
    last = max(x for points in found.values() for x, _ in points)
    series = [Series("planned as published", [(0.0, 0.0), (last, last)], 6, dashed=True)]
    series += [Series(name, sorted(points), i, joined=False) for i, (name, points) in enumerate(found.items())]
    count = sum(map(len, found.values()))
    title = f"{count} published training steps, planned without a fit"
    return standalone(line_chart(
        series, label=title, title=title, width=800, height=330,
        x=Axis("published seconds per step", form=_power), y=Axis("planned seconds per step", log=0, form=_power),
    ), themed=True)


def optimizers() -> str | None:
    """Training loss under each optimizer rule at the setting that its search chose, over AdamW's at the same step."""
    record = RESULTS / "optimizer-curves.jsonl"
    if not record.exists():
        return None
    curves = _curves_of_rules([json.loads(row) for row in record.read_text().splitlines()])
    reference, steps = curves["adamw"], 100 * len(curves["adamw"])
    series = [
        Series(rule, [(100.0 * i + 50, loss / reference[i]) for i, loss in enumerate(losses) if i >= 4], number,
               dashed=number >= COLOURS)
        for number, (rule, losses) in enumerate(curves.items())
    ]
    title = f"Training loss under {len(series)} rules over AdamW's, {steps:,} steps"
    return standalone(line_chart(
        series, label=title, title=title, width=800, height=330, x=Axis("step of 512 tokens"),
        y=Axis("loss / AdamW's", log=0, form=lambda v: f"{v:.2f}"),
    ), themed=True)


def _curves_of_rules(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The loss of each 100 steps of each rule, by the longest runs with the record's first seed: the best of each."""
    steps, seed = max(run["steps"] for run in runs), runs[0]["seed"]
    best: dict[str, dict[str, Any]] = {}
    for run in runs:
        if (run["steps"], run["seed"]) == (steps, seed):
            best[run["rule"]] = min(run, best.get(run["rule"], run), key=lambda one: one["held_out"])
    return {rule: run["training_loss_of_each_100_steps"] for rule, run in best.items()}


def _power(exponent: float) -> str:
    """Seconds of a logarithm."""
    return f"{10**exponent:.3g}"


PICTURES: dict[str, Callable[[], str | None]] = {
    "layouts": layouts, "planned": planned, "optimizers": optimizers, "tensor": tensor, "sequence": sequence,
    "pipeline": pipeline, "zero": zero, "context": context, "expert": expert,
}


def main() -> int:
    for name, draw in PICTURES.items():
        picture = draw()
        if picture is not None:
            (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")
            print(f"docs/images/{name}.svg: {len(picture):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
