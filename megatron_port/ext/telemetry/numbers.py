"""Numbers as people read them, and round values for an axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_port.ext.telemetry.step_metrics import Metric


def quantity(value: float) -> str:
    """Three significant digits and a decimal prefix: 12345 → ``12.3k``."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}" if abs(value) / limit < 999.5 else f"{value / limit:.0f}{suffix}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """A tick or a value with at most four digits."""
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 10_000:
        return f"{value:.4g}"
    return quantity(float(value)) if abs(value) >= 10_000 else f"{value:.1e}"


def formatted(value: float, form: str, factor: float = 1.0) -> str:
    """A value times ``factor`` in a form of ``telemetry.step_metrics``: ``quantity``, ``bytes``, or a format."""
    if form in ("quantity", "bytes"):
        return f"{quantity(value)}{'B' if form == 'bytes' else ''}"
    return form.format(value if factor == 1.0 else factor * value)


def shown(metric: Metric, record: Mapping[str, Any]) -> str:
    """The value of a metric in a step's record."""
    if callable(metric.form):
        return metric.form(record)
    return formatted(metric.type(record[metric.name]), metric.form, metric.factor)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within [low, high], about ``count`` steps apart."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten between the exponents ``low`` and ``high``; thinned where there are many."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    return [10.0**e for e in range(first, last + 1, max(1, (last - first) // 5))]
