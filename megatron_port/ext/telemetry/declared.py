"""The metrics that plugins of a run have declared, in its folder: readers of the folder import no plugin."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megatron_port.core.errors import ConfigError
from megatron_port.core.io.files import write_bytes
from megatron_port.core.io.metric import Chart, Metric
from megatron_port.core.io.step_metrics import declared_metrics, step_metrics
from megatron_port.core.io.typed_json import read_optional

FILE_NAME = "declared-metrics.json"
LARGEST = 1 << 20
"""Bytes of a file that is believed."""
TYPES: dict[str, type] = {"float": float, "int": int, "bool": bool}


@dataclass(frozen=True, kw_only=True)
class DeclaredMetric:
    """A metric as JSON. What only the run itself needs is left out."""

    name: str
    type: Literal["float", "int", "bool"]
    unit: str = ""
    label: str = ""
    chart: str = ""
    zero: bool = False
    """The chart's axis begins at 0."""
    form: str = "{:.4g}"
    factor: float = 1.0
    curve: str = ""
    summary: Literal["", "last", "mean", "max"] = ""
    help: str = ""

    @classmethod
    def of(cls, metric: Metric) -> DeclaredMetric:
        """Return the declaration of a metric; a form that is a function is the default's."""
        kind: Literal["float", "int", "bool"] = metric.type.__name__  # type: ignore[assignment]
        drawn, form = metric.drawn, metric.form if isinstance(metric.form, str) else cls.form
        return cls(
            name=metric.name, type=kind, unit=metric.unit, label=metric.label, chart=drawn.title if drawn else "",
            zero=drawn is not None and drawn.zero, form=form, factor=metric.factor, curve=metric.curve,
            summary=metric.summary, help=metric.help,
        )

    def metric(self) -> Metric:
        """Return the metric. Raises ConfigError where it cannot be one."""
        return Metric(
            self.name, TYPES[self.type], unit=self.unit, label=self.label,
            chart=Chart(self.chart, zero=self.zero, form=self.form) if self.chart else "", help=self.help,
            form=self.form, factor=self.factor, curve=self.curve, summary=self.summary,
        )


@dataclass(frozen=True)
class DeclaredMetrics:
    """Contents of the file."""

    metrics: tuple[DeclaredMetric, ...] = ()


def known_metrics(folder: Path) -> dict[str, Metric]:
    """Return the metrics by name that lines of a run may have. A file that is damaged adds none."""
    found: list[Metric] = []
    for declared in _read(folder):
        with contextlib.suppress(ConfigError):
            found.append(declared.metric())
    return step_metrics(found)


def write_declared(folder: Path, guard: Callable[[], None]) -> None:
    """Write what plugins have declared in this process, beside what earlier attempts of the run declared.

    ``guard``: called before the file is changed; what it raises passes.

    Raises:
        OSError: the file system refused.
    """
    mine = {metric.name: DeclaredMetric.of(metric) for metric in declared_metrics()}
    if not mine:
        return
    every = {declared.name: declared for declared in _read(folder)} | mine
    folder.mkdir(parents=True, exist_ok=True)
    guard()
    content = json.dumps(asdict(DeclaredMetrics(tuple(every.values()))), indent=1)
    write_bytes(folder / FILE_NAME, content.encode() + b"\n")


def _read(folder: Path) -> tuple[DeclaredMetric, ...]:
    found, _ = read_optional(folder / FILE_NAME, DeclaredMetrics, most=LARGEST)
    return () if found is None else found.metrics
