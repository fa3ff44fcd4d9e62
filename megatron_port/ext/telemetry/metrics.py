"""metrics.jsonl, the source of truth of a run: one JSON object per line. ``telemetry.step_metrics`` has the fields.

A value that is not known is absent: never 0, never null. A value that is known
but not finite is the string ``NaN``, ``Infinity`` or ``-Infinity`` (JSON has no
such numbers), which ``float()`` reads back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from megatron_port.core.errors import ConfigError
from megatron_port.core.io.files import atomic_file, open_regular, write_bytes
from megatron_port.core.io.typed_json import WrongContent, finite_or_text, parse_json, read_optional
from megatron_port.ext.telemetry.step_metrics import Chart, Metric, declared_metrics, step_metrics

# The metrics that plugins of a run have declared, in its folder: readers of the folder import no plugin.

DECLARED_FILE = "declared-metrics.json"
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
    write_bytes(folder / DECLARED_FILE, content.encode() + b"\n")


def _read(folder: Path) -> tuple[DeclaredMetric, ...]:
    found, _ = read_optional(folder / DECLARED_FILE, DeclaredMetrics, most=LARGEST)
    return () if found is None else found.metrics


FILE_NAME = "metrics.jsonl"
LINE_CHARACTERS = 1 << 20
"""A longer line is no record."""
MOST = 1e100
"""Largest finite number that is believed: squares and sums of such are still finite."""
LAST_SECOND = 1e11
"""Clock time in the year 5138, in seconds."""
Value = float | int | bool
Record = Mapping[str, "Value | None"]

_TIMES = ("time", "seconds")
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(record: Record) -> str:
    """One line, without its newline. None is left out.

    Raises:
        ValueError: an unknown field, a wrong type, or no ``step``.
    """
    known = step_metrics()
    unknown = [name for name in record if name not in known]
    if unknown or record.get("step") is None:
        raise ValueError(f"not a metrics record: unknown fields {unknown}, step {record.get('step')!r}")
    line = {name: _json_value(metric, record[name]) for name, metric in known.items() if record.get(name) is not None}
    return json.dumps(line, allow_nan=False)


def _json_value(metric: Metric, value: Any) -> Value | str:
    name, want = metric.name, metric.type
    if want is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; expected a bool")
        return bool(value)
    if isinstance(value, bool) or not isinstance(value, int if want is int else (int, float)):
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}); expected {want.__name__}")
    if want is int:
        return int(value)
    return finite_or_text(float(value))


def decode(line: str, known: Mapping[str, Metric]) -> dict[str, Value] | None:
    """A record of a line; None if the line is torn or not a record. Fields of other versions are kept out.

    ``known``: the metrics of the run (``telemetry.metrics``).

    A line in which one known field has a value that no run writes (another type, a count below 0 or above 63 bits, a
    time that no clock shows) is not a record: none of it is believed.
    """
    try:
        raw = parse_json(line)
    except WrongContent:
        return None
    if not isinstance(raw, dict) or "step" not in raw:
        return None
    record: dict[str, Value] = {}
    for name, value in raw.items():
        if name in known:
            found = _read_value(known[name], value)
            if found is None:
                return None
            record[name] = found
    return record


def _read_value(metric: Metric, value: Any) -> Value | None:
    """A field's value, or None if it cannot be one."""
    name, want = metric.name, metric.type
    if want is bool:
        return value if isinstance(value, bool) else None
    if want is int:
        return value if type(value) is int and 0 <= value < 1 << 63 else None
    if isinstance(value, str):
        value = _WORDS.get(value)
    finite = type(value) in (int, float) and abs(value) < MOST
    if not finite and not (type(value) is float and not math.isfinite(value)):
        return None
    if name in _TIMES and not 0 <= value < LAST_SECOND:
        return None
    return float(value)


def read_metrics(path: Path, on_bad: Callable[[int], None] | None = None) -> Iterator[dict[str, Value]]:
    """Records in the order of the file; torn and hostile lines are passed over. Constant memory.

    ``on_bad`` is called with the number of each line that is passed over.
    """
    known = known_metrics(path.parent)
    with open(open_regular(path, follow=True), encoding="utf-8", errors="replace", newline="\n") as stream:
        number, within = 0, False
        while line := stream.readline(LINE_CHARACTERS):
            first, within = not within, not line.endswith("\n")
            number += first
            record = decode(line, known) if first and len(line) < LINE_CHARACTERS else None
            if record is not None:
                yield record
            elif first and line.strip() and on_bad is not None:
                on_bad(number)


class MetricsWriter:
    """Appends to ``metrics.jsonl``; each line is flushed to the system before ``write`` returns.

    Args:
        path: the file; made, with its folder, if it is not there.
        resumed_step: steps done by the state that this run starts from (0: a fresh start; also then evaluations
            at step 0 of an earlier attempt go). Lines of later steps, which will be run again, and torn lines are
            removed, by rewriting the file under a temporary name.
        guard: called before each change of the file; what it raises passes, and nothing is changed.

    Raises:
        OSError: the file system refused.
    """

    def __init__(self, path: Path, resumed_step: int = 0, guard: Callable[[], None] = lambda: None) -> None:
        self.path, self._guard = path, guard
        path.parent.mkdir(parents=True, exist_ok=True)
        guard()
        if path.exists():
            _truncate(path, resumed_step, guard)
        self._stream: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._torn = False

    def write(self, record: Record) -> None:
        """Append one line. Raises ValueError for a bad record, OSError if the file system refused."""
        line = (encode(record) + "\n").encode()
        self._guard()
        if self._torn:
            line = b"\n" + line
        # Unknown until the write came back: a part of the line may be on disk.
        self._torn = True
        written = self._stream.write(line)
        if written != len(line):
            raise OSError(28, f"{written} of {len(line)} bytes were written", str(self.path))
        self._torn = False

    def close(self) -> None:
        """Flush to disk and close; a second call does nothing."""
        if not self._stream.closed:
            try:
                os.fsync(self._stream.fileno())
            finally:
                self._stream.close()


def _truncate(path: Path, resumed_step: int, guard: Callable[[], None]) -> None:
    """Keep whole lines of steps up to ``resumed_step``, one step line and one evaluation each."""
    seen: set[tuple[int, bool]] = set()
    known = known_metrics(path.parent)
    source = open_regular(path, follow=True)
    with open(source, encoding="utf-8", errors="replace") as old, atomic_file(path, guard=guard) as new:
        for line in old:
            record = decode(line, known)
            if record is None or record["step"] > resumed_step or resumed_step == 0:
                continue
            key = (int(record["step"]), "validation_loss" in record)
            if key not in seen:
                seen.add(key)
                new.write((line if line.endswith("\n") else line + "\n").encode())
