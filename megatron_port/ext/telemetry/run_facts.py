"""Numbers of a whole run, as the report's table has them; docs/report.md defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megatron_port.ext.telemetry.console import duration
from megatron_port.ext.telemetry.numbers import formatted
from megatron_port.ext.telemetry.step_metrics import OWN, Metric


@dataclass(frozen=True)
class Fact:
    """One number of a whole run."""

    name: str
    """Its own, or that of the metric that it sums up."""
    label: str
    form: str | Callable[[float], str]
    """As ``telemetry.step_metrics.Metric.form``, or a function of the value."""
    of: Literal["", "last", "finite", "mean", "max"] = ""
    """The metric's value at the last step, its last finite value, its mean or its maximum; empty: of ``run_data``."""
    factor: float = 1.0

    def text(self, value: float) -> str:
        """Return the value as people read it."""
        return self.form(value) if callable(self.form) else formatted(float(value), self.form, self.factor)


_percent = partial(Fact, form="{:.4g} %", factor=100.0)
FACTS = (
    Fact("step", "steps", "{:,.0f}", "last"),
    Fact("tokens", "tokens", "quantity", "last"),
    Fact("loss", "last training loss (nats per token)", "{:.4f}", "finite"),
    Fact("validation_loss", "last validation loss", "{:.4f}"),
    Fact("best_validation_loss", "best validation loss", "{:.4f}"),
    Fact("grad_norm", "last gradient norm", "{:.4g}", "finite"),
    Fact("seconds_per_step", "seconds per step, median", "{:.4g}"),
    Fact("tokens_per_second", "tokens/s, mean", "quantity", "mean"),
    Fact("model_tflops_per_device", "model TFLOP/s per device, mean", "{:.4g}", "mean"),
    Fact("hardware_tflops_per_device", "hardware TFLOP/s per device, mean", "{:.4g}", "mean"),
    _percent("mfu", "share of peak, model (MFU), attention counted in full", of="mean"),
    _percent("hfu", "share of peak, hardware (HFU), the same", of="mean"),
    Fact("memory_bytes", "largest memory of the reporting rank", "bytes", "max"),
    Fact("fragmentation_bytes", "reserved by its allocator beyond that", "bytes", "max"),
    Fact("wall_seconds", "wall time, first start to last line", duration),
    Fact("attempts", "attempts", "{:,.0f}"),
    _percent("goodput", "goodput"),
    _percent("evaluation_share", "time in evaluations"),
    Fact("skipped_total", "updates not applied", "{:,.0f}", "last"),
    Fact("anomalies_total", "anomalies", "{:,.0f}", "last"),
)
"""The package's own, in the order of the table."""
TILES = ("validation_loss", "loss", "tokens", "tokens_per_second", "model_tflops_per_device", "mfu", "goodput",
         "wall_seconds")
"""Those that are read first."""
_OWN = frozenset(metric.name for metric in OWN)
_WORDS: Mapping[str, str] = {"last": "last value", "mean": "mean", "max": "maximum"}


def facts_of(metrics: Mapping[str, Metric]) -> tuple[Fact, ...]:
    """Return the package's own facts, and those of metrics that plugins have declared."""
    more = (
        Fact(m.name, f"{m.label or m.name}, {_WORDS[m.summary]}{f' ({m.unit})' if m.unit else ''}",
             m.form if isinstance(m.form, str) else "{:.4g}", m.summary, m.factor)
        for m in metrics.values() if m.summary and m.name not in _OWN
    )
    return (*FACTS, *more)
