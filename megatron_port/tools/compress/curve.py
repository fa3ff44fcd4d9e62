"""Loss against size and against operations, of several runs, as one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.config.loader import load
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.ext.telemetry.flops import model_flops, parameter_count
from megatron_port.ext.telemetry.numbers import quantity
from megatron_port.tools.charts.page import Axis, Note, Series, card, columns, line_chart, page, table
from megatron_port.tools.report.run_data import read_run


@dataclass(frozen=True)
class Point:
    """A trained model."""

    name: str
    loss: float
    """Validation loss, nats per token, at the end."""
    parameters: int
    forward_flops: float
    """Per token."""
    training_flops: float
    """FLOPs of everything that the run trained on."""
    tokens: int
    history: tuple[tuple[int, float], ...]
    """(tokens, validation loss) over the run."""


def point_of(folder: Path) -> Point:
    """Return what a run's folder says. Raises ConfigError: it is none, or has no validation loss."""
    run, config = read_run(folder), load(folder).config
    if not run.validation:
        raise ConfigError(f"{folder}: no validation loss in it; train it with training.eval_interval and data for it")
    schedule = BatchSchedule(config.batch, max(config.layout.data_parallel_size, 1))
    tokens = {step: schedule.step_plan(step)[0] * config.model.seq_length for step, _ in run.validation}
    last, loss = run.validation[-1]
    model = config.model
    forward = sum(u.forward_flops(model.seq_length) for u in model_spec(model).units) / model.seq_length
    return Point(
        run.name, loss, parameter_count(model), forward, model_flops(model) / model.seq_length * tokens[last],
        tokens[last], tuple((tokens[step], value) for step, value in run.validation),
    )


def curve_page(points: Sequence[Point]) -> str:
    """Return the page (HTML): loss by parameters, by operations per token, and over the tokens of each run."""
    loss = Axis(label="validation loss, nats per token")
    by_size = _chart(points, [float(p.parameters) for p in points], "parameters", loss)
    by_flops = _chart(points, [p.forward_flops for p in points], "forward FLOPs per token", loss)
    history = line_chart(
        [Series(p.name, [(float(t), v) for t, v in p.history], colour=i % 8, dots=True) for i, p in enumerate(points)],
        label="validation loss over the tokens of each run", x=Axis(label="tokens", form=quantity), y=loss,
    )
    rows = [
        (p.name, (f"{p.parameters:,}", "n"), (f"{p.forward_flops:,.0f}", "n"), (f"{p.tokens:,}", "n"),
         (f"{p.training_flops:.3g}", "n"), (f"{p.loss:.4f}", "n")) for p in points
    ]
    head = ("run", ("parameters", "n"), ("forward FLOPs per token", "n"), ("tokens", "n"), ("training FLOPs", "n"),
            ("validation loss", "n"))
    body = "<h1>Loss against size</h1>" + columns([
        card("By parameters", by_size), card("By forward FLOPs per token", by_flops), card("Over training", history),
    ]) + table(head, rows)
    return page("Loss against size", body)


def _chart(points: Sequence[Point], at: Sequence[float], label: str, loss: Axis) -> str:
    """One dot for each run, and a line through the best at each size."""
    best: list[tuple[float, float]] = []
    for x, y in sorted((x, p.loss) for x, p in zip(at, points)):
        if not best or best[-1][0] != x:
            best.append((x, y))
    dots = [Series(p.name, [(x, p.loss)], colour=i % 8, joined=False) for i, (x, p) in enumerate(zip(at, points))]
    return line_chart(
        [Series("best of each size", best, colour=6, dashed=True), *dots], label=f"validation loss by {label}",
        x=Axis(label=label, form=quantity, log=2), y=loss,
        notes=[Note(x, p.loss, p.name) for x, p in zip(at, points)],
    )


def as_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the points as JSON values."""
    return [asdict(p) for p in points]
