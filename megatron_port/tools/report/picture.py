"""The loss curve of a run as a picture, from metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from pathlib import Path

from megatron_port.core.io.files import write_text
from megatron_port.ext.telemetry.metrics import read_metrics
from megatron_port.ext.telemetry.numbers import quantity
from megatron_port.tools.charts.page import Axis, Mark, Note, Series, line_chart, standalone

WIDTH, HEIGHT = 800, 400
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
    """Write an SVG: the training loss of every step, validation points, and the corpus's unigram entropy as a line.

    Losses and entropy are in nats per token. The highest training loss is labelled where it is above the first one,
    and steps whose loss is not finite are marked at the top. Returns False, and writes nothing, if the file holds no
    finite loss.

    Raises:
        OSError: a file cannot be read or written.
    """
    curves = read_curves(metrics)
    if not curves.training and not curves.validation:
        return False
    write_text(picture, loss_picture(curves, unigram_entropy, title))
    return True


def loss_picture(curves: Curves, unigram_entropy: float | None = None, title: str = "Loss") -> str:
    """The picture of :func:`draw_loss` as an SVG that stands alone."""
    series, notes = _training(curves.training)
    if curves.validation:
        points = [(float(s), v) for s, v in sorted(curves.validation.items())]
        series.append(Series("validation", points, 1, joined=False))
        notes.append(Note(*points[-1], f"{points[-1][1]:.3f}"))
    lost = sorted(curves.lost)
    chart = line_chart(
        series, label=title, title=title, width=WIDTH, height=HEIGHT, notes=notes,
        x=Axis("step" if curves.tokens is None else f"step (the last after {quantity(curves.tokens)} tokens)", least=0),
        y=Axis("loss (nats per token)", log=0),
        marks=[Mark(step, f"step {step}: the training loss is not finite", bad=True, short=True) for step in lost],
        keys=[(f"training loss not finite ({len(lost)})", "var(--bad)")] if lost else [],
        rules=[] if unigram_entropy is None else [(unigram_entropy, f"unigram entropy {unigram_entropy:.3f}")],
    )
    return standalone(chart)


def _training(losses: Mapping[int, float]) -> tuple[list[Series], list[Note]]:
    """The curves of the training loss, and the name of its highest value unless the loss never rose above its first."""
    points = [(float(s), v) for s, v in sorted(losses.items())]
    if not points:
        return [], []
    values = [v for _, v in points]
    series = [Series("training (every step)", points, 0, faint=len(points) >= _SMOOTH_FROM)]
    if len(points) >= _SMOOTH_FROM:
        window = 2 * (len(points) // 100) + 1
        mean = [(step, v) for (step, _), v in zip(points, smoothed(values, window))]
        series.append(Series(f"training (mean of {window} steps)", mean, 0))
    highest = max(values)
    at = points[values.index(highest)][0]
    return series, [Note(at, highest, f"{highest:.3f} at step {at:g}")] if highest > values[0] else []
