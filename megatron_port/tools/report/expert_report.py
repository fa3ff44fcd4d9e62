"""The part of a report about experts: a map of their load over the steps for each layer, and the last window's numbers.

docs/report.md describes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_port.core.io.numbers import ticks
from megatron_port.ext.telemetry.expert_file import FILE_NAME, read_rows
from megatron_port.ext.telemetry.expert_load import LOW, LayerCounts
from megatron_port.tools.charts.heat import heat_map, row_names
from megatron_port.tools.charts.page import Cell, card, columns, fold, table
from megatron_port.tools.charts.shapes import drawing, legend, text
from megatron_port.tools.report.run_data import RunData

COLUMNS = 96
"""Most columns of a map; beyond, neighbouring rows of the file are joined."""
CELLS = 1_500_000
"""Cells of all maps together; beyond, only the layers of the most uneven load have one."""
LEVELS = (0.1, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Loads, over the mean, between which colours change."""
FILLS = (
    "var(--bad)", "var(--c0)", "color-mix(in srgb, var(--c0) 60%, var(--paper))",
    "color-mix(in srgb, var(--c0) 25%, var(--paper))", "var(--idle)",
    "color-mix(in srgb, var(--c1) 35%, var(--paper))", "color-mix(in srgb, var(--c1) 70%, var(--paper))", "var(--c1)",
)
LEFT, TOP, WIDTH = 44.0, 8.0, 480.0
OPEN = 4
"""Maps that are shown without a click."""


@dataclass
class ExpertHistory:
    """Counts by window of steps, at most ``COLUMNS`` of them."""

    windows: list[tuple[int, int, LayerCounts]] = field(default_factory=list)
    """(first step, last step, sums)"""
    width: int = 1
    """Steps that windows are joined up to."""

    def add(self, step: int, steps: int, counts: LayerCounts) -> None:
        """Add a row of experts.jsonl; rows come in the order of their steps."""
        self.windows.append((max(step - steps + 1, 1), step, counts))
        while len(self.windows) > COLUMNS:
            self.width *= 2
            joined: list[tuple[int, int, LayerCounts]] = []
            for first, last, sums in self.windows:
                if joined and (joined[-1][1] - 1) // self.width == (last - 1) // self.width:
                    joined[-1] = joined[-1][0], last, joined[-1][2].plus(sums)
                else:
                    joined.append((first, last, sums))
            self.windows = joined


def read_history(run: RunData) -> ExpertHistory:
    """Return what the run's experts.jsonl holds; empty without one."""
    history, path = ExpertHistory(), Path(run.folder) / FILE_NAME
    try:
        for step, steps, counts in read_rows(path, lambda: run.leave_out(FILE_NAME)):
            if not history.windows or step > history.windows[-1][1]:
                history.add(step, steps, counts)
    except OSError:
        pass
    return history


def expert_part(run: RunData, history: ExpertHistory) -> str:
    """Return the maps and the table of a run; empty where it has no experts."""
    if not history.windows:
        return ""
    last = history.windows[-1][2]
    shown = _shown(last, len(history.windows))
    maps = [card(f"{run.name}: layer {last.layers[i]}", layer_map(history, i)) for i in shown]
    left = len(last.layers) - len(shown)
    words = (
        "Load of each expert (rows) over the steps, as a multiple of its layer's mean; tokens before any is dropped."
        + (f" The {len(shown)} layers of the most uneven load are drawn, {left} are not." if left else "")
    )
    more = fold(f"{len(maps) - OPEN} layers more", columns(maps[OPEN:])) if len(maps) > OPEN else ""
    return f'<p class="soft">{words}</p>{columns(maps[:OPEN])}{more}{_table(run, history.windows[-1])}'


def _shown(last: LayerCounts, windows: int) -> list[int]:
    """Return the layers that are drawn, by their place, in order."""
    room = max(1, CELLS // (windows * last.tokens.shape[1]))
    uneven = np.argsort(-last.load.max(axis=1), kind="stable")[:room]
    return sorted(int(i) for i in uneven)


def layer_map(history: ExpertHistory, layer: int) -> str:
    """Draw the load of one layer's experts, by its place among the layers that have experts."""
    loads = np.stack([sums.load[layer] for _, _, sums in history.windows], axis=1)
    levels = np.digitize(loads, LEVELS).tolist()
    experts = len(levels)
    height = experts * max(1.0, min(14.0, 224.0 / experts))
    out = heat_map(levels, FILLS, left=LEFT, top=TOP, width=WIDTH, height=height)
    out += row_names([str(e) for e in range(experts)], left=LEFT, top=TOP, height=height)
    out += _steps(history, TOP + height + 16)
    names = [f"below {LEVELS[0]:g}", *(f"to {level:g}" for level in LEVELS[1:]), f"above {LEVELS[-1]:g}"]
    swatches, foot = legend(LEFT, TOP + height + 40, list(zip(names, FILLS)), WIDTH)
    label = f"load of the experts of layer {history.windows[-1][2].layers[layer]} by step"
    return drawing(LEFT + WIDTH + 16, TOP + height + 30 + foot, [*out, swatches], label)


def _steps(history: ExpertHistory, y: float) -> list[str]:
    """Write round steps below the columns that hold them."""
    wide, out = WIDTH / len(history.windows), []
    for value in ticks(history.windows[0][0], history.windows[-1][1], 6):
        at = next((i for i, (_, last, _) in enumerate(history.windows) if last >= value), None)
        if at is not None and value == round(value):
            out.append(text(LEFT + (at + 0.5) * wide, y, f"{value:g}", anchor="middle", kind="axis"))
    return out


def _table(run: RunData, window: tuple[int, int, LayerCounts]) -> str:
    first, last, counts = window
    load = counts.load
    low = (load < LOW).sum(axis=1)
    head: list[Cell] = [f"steps {first} to {last}", *[(name, "n") for name in (
        "most loaded expert", "of the mean", "least loaded", "of the mean", f"below {100 * LOW:g} % of it", "dropped",
        "margin")]]
    rows: list[Sequence[Cell]] = []
    for i, layer in enumerate(counts.layers):
        most, least = int(load[i].argmax()), int(load[i].argmin())
        cells = [str(most), f"{load[i, most]:.3g}", str(least), f"{load[i, least]:.3g}", str(int(low[i]))]
        sums = counts.sums
        cells.append(f"{100 * sums['dropped'][i] / counts.tokens[i].sum():.2f} %" if "dropped" in sums else "")
        cells.append(f"{counts.mean('margin')[i]:.3g}" if "margin" in sums else "")
        rows.append([f"layer {layer}", *((cell, "n") for cell in cells)])
    return card(f"{run.name}: load of experts in the last window", table(head, rows, bad=[bool(n) for n in low]))
