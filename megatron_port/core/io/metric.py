"""Declaration of a number that each step of a run has; every output that shows it follows (no torch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_port.core.errors import ConfigError

FORM = re.compile(r"[^{}]*(\{(:,?(\.\d{1,2})?[efgd%]?)?\}[^{}]*)?")
"""What a form may be: text around one value, with a precision of at most two digits."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
Summary = Literal["", "last", "mean", "max"]


@dataclass(frozen=True)
class Chart:
    """A chart of the report and of the live page, of all metrics that name it."""

    title: str
    """With the unit."""
    zero: bool = False
    """The axis begins at 0."""
    form: str = ""
    """Form of the axis's numbers, as :attr:`Metric.form`; empty: four digits."""
    varies: bool = False
    """Drawn only where the values differ."""


@dataclass(frozen=True)
class Metric:
    """One number of a step's line in metrics.jsonl.

    Raises:
        ConfigError: a name or a form that it cannot have.
    """

    name: str
    """Field of metrics.jsonl: small letters, digits and ``_``."""
    type: type
    """float, int or bool."""
    unit: str = ""
    """Unit of the value as it is written."""
    label: str = ""
    """In the console's lines; empty: it is not there."""
    chart: Chart | str = ""
    """Chart that draws it, or the title of one of its own; empty: none."""
    help: str = ""
    """Definition, as docs/metrics.md has it (Markdown)."""
    form: str | Callable[[Mapping[str, Any]], str] = "{:.4g}"
    """How a person reads it: a format of the value times ``factor``, ``quantity`` (12.3k), ``bytes``, or a function of
    the step's whole record."""
    factor: float = 1.0
    """What the value is multiplied by where people read it: 100 for percent."""
    tag: str | None = ""
    """Name in TensorBoard and the trackers; empty: ``name``; None: it is not there."""
    hidden: float | bool | None = None
    """Value that the console leaves out."""
    curve: str = ""
    """Name of its line where several share a chart."""
    summary: Summary = ""
    """What the report's table says of a whole run: its last value, mean or maximum; empty: nothing. The package's own
    facts are in ``telemetry.run_facts``."""

    def __post_init__(self) -> None:
        bad = "" if NAME.fullmatch(self.name) else f"the name {self.name!r} is not of small letters, digits and '_'"
        if self.type not in (float, int, bool):
            bad = f"{self.name!r} is of type {self.type!r}; use float, int or bool"
        for form in (self.form, self.drawn.form if self.drawn else ""):
            if isinstance(form, str) and form not in ("quantity", "bytes") and not FORM.fullmatch(form):
                bad = f"the form {form!r} of {self.name!r} is none; use e.g. '{{:.4g}}', quantity or bytes"
        if bad:
            raise ConfigError(f"metric: {bad}")

    @property
    def drawn(self) -> Chart | None:
        """Chart that draws it."""
        if isinstance(self.chart, Chart):
            return self.chart
        return Chart(self.chart, form=self.form if isinstance(self.form, str) else "") if self.chart else None
