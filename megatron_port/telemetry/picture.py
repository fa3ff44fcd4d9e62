"""The loss curve of a run as a picture, from metrics.jsonl alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

from megatron_port.telemetry.metrics import read_metrics
from megatron_port.telemetry.text import quantity

_TRAINING, _VALIDATION, _ENTROPY, _INK, _GRID = "#2f6f9f", "#d1495b", "#6b705c", "#2b2d33", "#e4e6ea"
_SMOOTH_FROM = 200


@dataclass
class Curves:
    """Points of a run; ``x`` of each is the step. A step that is recorded twice counts as its last line."""

    training: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    """Training steps whose loss is not finite."""
    tokens: int | None = None


def read_curves(metrics: Path) -> Curves:
    """Training and validation losses of a metrics.jsonl, every step. Raises OSError if it cannot be read."""
    curves = Curves()
    for record in read_metrics(metrics):
        step = int(record["step"])
        for name, points in (("loss", curves.training), ("validation_loss", curves.validation)):
            value = record.get(name)
            if value is not None and isfinite(value):
                points[step] = float(value)
                if name == "loss":
                    curves.lost.discard(step)
            elif value is not None and name == "loss":
                points.pop(step, None)
                curves.lost.add(step)
        if "tokens" in record:
            curves.tokens = int(record["tokens"])
    return curves


def smoothed(values: list[float], window: int) -> list[float]:
    """Mean over a window of ``2 * (window // 2) + 1`` values around each; smaller near the ends, so it never lags."""
    half = window // 2
    sums = [0.0, *accumulate(values)]
    out = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        out.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return out


def draw_loss(
    metrics: Path, picture: Path, *, unigram_entropy: float | None = None, title: str = "Loss"
) -> bool:
    """Write a PNG: the training loss of every step, validation points, and the corpus's unigram entropy as a line.

    Losses and entropy are in nats per token. The highest training loss is labelled where it is above the first one,
    and steps whose loss is not finite are marked at the top. Returns False, and writes nothing, if the file holds no
    finite loss.

    Raises:
        OSError: a file cannot be read or written.
        ImportError: matplotlib is not installed.
    """
    curves = read_curves(metrics)
    if not curves.training and not curves.validation:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps figures and a backend in module globals.
    figure = Figure(figsize=(8.0, 4.8), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), curves, unigram_entropy, title)
    part = picture.with_name(picture.name + ".part")
    with open(part, "wb") as stream:
        figure.savefig(stream, format="png")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, picture)
    return True


def _draw(axes: Any, curves: Curves, unigram_entropy: float | None, title: str) -> None:
    if curves.training:
        steps = sorted(curves.training)
        values = [curves.training[s] for s in steps]
        if len(steps) >= _SMOOTH_FROM:
            window = 2 * (len(steps) // 100) + 1
            axes.plot(steps, values, color=_TRAINING, alpha=0.45, linewidth=0.8, label="training (every step)")
            axes.plot(
                steps, smoothed(values, window), color=_TRAINING, linewidth=1.8,
                label=f"training (mean of {window} steps)",
            )
        else:
            axes.plot(steps, values, color=_TRAINING, linewidth=1.6, label="training (every step)")
        _label_peak(axes, steps, values)
    if curves.lost:
        axes.plot(
            sorted(curves.lost), [1.0] * len(curves.lost), color=_VALIDATION, linestyle="none", marker="x",
            markersize=6, transform=axes.get_xaxis_transform(), clip_on=False, zorder=3,
            label=f"training loss not finite ({len(curves.lost)})",
        )
    if curves.validation:
        steps = sorted(curves.validation)
        values = [curves.validation[s] for s in steps]
        axes.plot(
            steps, values, color=_VALIDATION, linestyle="none", marker="o", markersize=6, markeredgecolor="white",
            label="validation", zorder=3, clip_on=False,
        )
        axes.annotate(
            f"{values[-1]:.3f}", (steps[-1], values[-1]), xytext=(7, 0), textcoords="offset points", va="center",
            color=_VALIDATION, fontsize=9, annotation_clip=False,
        )
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color=_ENTROPY, linewidth=1.2, linestyle=(0, (5, 3)),
                     label=f"unigram entropy {unigram_entropy:.3f}")
    _style(axes, curves, title)


def _label_peak(axes: Any, steps: list[int], values: list[float]) -> None:
    """Name the highest loss and its step, unless the loss never rose above its first value."""
    highest = max(values)
    if highest > values[0]:
        step = steps[values.index(highest)]
        axes.annotate(
            f"{highest:.3f} at step {step}", (step, highest), xytext=(6, -2), textcoords="offset points", va="top",
            color=_TRAINING, fontsize=9,
        )


def _style(axes: Any, curves: Curves, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    last = max([*curves.training, *curves.validation, *curves.lost])
    axes.set_xlim(0, max(last, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step" if curves.tokens is None else f"step (the last after {quantity(curves.tokens)} tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=10)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_INK)
    axes.tick_params(colors=_INK, length=0, labelsize=9)
    axes.tick_params(axis="x", length=3)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    axes.legend(frameon=True, framealpha=1, edgecolor="white", fontsize=9, labelcolor=_INK, loc="upper right")
