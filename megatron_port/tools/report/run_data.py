"""What a run left in its folder, read for a report. Missing files are missing parts, never errors."""

from __future__ import annotations

import contextlib
import heapq
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from megatron_port.core.errors import ConfigError
from megatron_port.core.io.files import open_regular, read_regular
from megatron_port.core.io.typed_json import Natural, Seconds, WrongContent, parse_json, read_optional, typed
from megatron_port.ext.telemetry.metrics import FILE_NAME, known_metrics, read_metrics
from megatron_port.ext.telemetry.run_facts import Fact, facts_of
from megatron_port.ext.telemetry.step_metrics import Metric, step_metrics
from megatron_port.run.run_files import IDENTITY, OUTCOME, AttemptOutcome
from megatron_port.run.run_state import CONFIG_BYTES, RunEvent

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

T = TypeVar("T")
LINE_BYTES = 1 << 20
MOST_EVENTS = 10_000
SAMPLE = 20_001
"""Step times from which the median is taken: the latest."""


@dataclass(frozen=True, kw_only=True)
class RunMark:
    """Fields that a report reads from ``run.json``."""

    id: str = ""
    config_hash: str = ""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Fields that a report reads from ``environment.json``."""

    commit: str | None = None
    command: Any = None
    host: str | None = None
    system: Any = None
    cpus: Any = None
    device: Any = None
    ranks: int | None = None
    layout: Any = None
    launcher: Any = None
    attempt: Any = None
    providers: Any = None
    versions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepSpread:
    """Fields that a report reads from a line of ``ranks.jsonl``: seconds of a step over the ranks."""

    step: Natural
    median: Seconds
    least: Seconds = 0.0
    most: Seconds = 0.0
    own_seconds: Mapping[str, Seconds] | None = None
    slowest: Mapping[str, Seconds] | None = None


POINTS = 480
"""Most buckets of a series."""


@dataclass
class Bucket:
    """The values of some neighbouring steps."""

    first: int
    last: int
    count: int
    total: float
    least: float
    most: float

    @property
    def mean(self) -> float:
        """Mean of the finite values."""
        return self.total / self.count

    @property
    def step(self) -> float:
        """The middle."""
        return (self.first + self.last) / 2

    def join(self, other: Bucket) -> Bucket:
        """Both together."""
        return Bucket(self.first, other.last, self.count + other.count, self.total + other.total,
                      min(self.least, other.least), max(self.most, other.most))


@dataclass
class Series:
    """Values by step, added in the order of the steps; a later value of the same step joins its bucket."""

    buckets: list[Bucket] = field(default_factory=list)
    width: int = 1
    """Steps a bucket."""
    lost: int = 0
    """Values that were not finite."""
    last: float | None = None

    def add(self, step: int, value: float) -> None:
        """One more value."""
        if not isfinite(value):
            self.lost += 1
            return
        self.last = value
        new = Bucket(step, step, 1, value, value, value)
        if self.buckets and step // self.width == self.buckets[-1].first // self.width:
            self.buckets[-1] = self.buckets[-1].join(new)
            return
        self.buckets.append(new)
        while len(self.buckets) > POINTS:
            self.width *= 2
            joined: list[Bucket] = []
            for bucket in self.buckets:
                if joined and joined[-1].first // self.width == bucket.first // self.width:
                    joined[-1] = joined[-1].join(bucket)
                else:
                    joined.append(bucket)
            self.buckets = joined

    @property
    def mean(self) -> float | None:
        """Over all values; None: there is none."""
        count = sum(b.count for b in self.buckets)
        return sum(b.total for b in self.buckets) / count if count else None


@dataclass
class RunData:
    """One run."""

    folder: Path
    name: str
    series: dict[str, Series] = field(default_factory=dict)
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss)"""
    events: list[dict[str, Any]] = field(default_factory=list)
    spread: list[dict[str, Any]] = field(default_factory=list)
    """Lines of ranks.jsonl."""
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """Dotted name → value."""
    config_text: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    """File → lines that are torn, or hold what no run writes."""
    reasons: dict[str, str] = field(default_factory=dict)
    """File → what is wrong with the first of them, where that is known."""
    facts: dict[str, float] = field(default_factory=dict)
    """Numbers of the whole run, by the name of their :class:`Fact`."""
    metrics: Mapping[str, Metric] = field(default_factory=step_metrics)
    """Metrics that its lines may have, by name."""

    def leave_out(self, file: str, reason: str = "") -> None:
        """Count a line of ``file`` that is not believed."""
        self.left_out[file] = self.left_out.get(file, 0) + 1
        if reason:
            self.reasons.setdefault(file, f" ({reason})")

    def note(self) -> str:
        """Return what was left out, in words; empty: nothing."""
        parts = [
            f"{n} line{'s' if n > 1 else ''} of {file}{self.reasons.get(file, '')}" for file, n in self.left_out.items()
        ]
        return f"left out, torn or not what a run writes: {', '.join(parts)}" if parts else ""


def read_run(folder: str | Path) -> RunData:
    """Read a run's folder. ConfigError: there is no metrics.jsonl in it."""
    folder = Path(folder)
    path = folder / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"{folder}: no {FILE_NAME} there; give the folder of a run, e.g. runs/quickstart")
    run = RunData(folder, folder.resolve().name, metrics=known_metrics(folder))
    read_around(run)
    _read_metrics(run, path)
    return run


def read_around(run: RunData) -> None:
    """Read everything but metrics.jsonl: environment, outcome, events, the ranks' times, configuration."""
    folder = run.folder
    run.left_out.clear()
    run.reasons.clear()
    environment, outcome = _object(run, "environment.json", Environment), _object(run, OUTCOME, AttemptOutcome)
    run.environment = {} if environment is None else {k: v for k, v in asdict(environment).items() if v is not None}
    run.outcome = {} if outcome is None else asdict(outcome)
    run.events = _events(run)
    run.spread = list(_lines(run, "ranks.jsonl", StepSpread))
    with contextlib.suppress(FileNotFoundError):
        try:
            run.config_text = read_regular(folder / "config.toml", CONFIG_BYTES).decode()
            run.config = dict(_flat(tomllib.loads(run.config_text)))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            run.leave_out("config.toml", str(error)[:200])


def _events(run: RunData) -> list[dict[str, Any]]:
    """Return the run's own events. An attempt with other settings that failed before it trained is no part of it."""
    identity = _object(run, IDENTITY, RunMark) or RunMark()
    known, digest = identity.id, identity.config_hash

    def ours(event: Mapping[str, Any]) -> bool:
        if not known:
            return True
        if event.get("run"):
            return bool(event["run"] == known)
        return "config_hash" not in event or bool(event["config_hash"] == digest)

    return [event for event in _lines(run, "events.jsonl", RunEvent) if ours(event)]


class MetricsSums:
    """What the lines of metrics.jsonl amount to, added one after another: the curves of ``run``, and its facts."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        summed = {fact.name for fact in facts_of(run.metrics) if fact.of in ("mean", "max")}
        run.series = {name: Series() for name, metric in run.metrics.items() if metric.drawn or name in summed}
        run.validation = []
        self._times: list[float] = []
        self._recent: list[tuple[int, float]] = []
        self._applied = self._evaluating = 0.0
        self._last: dict[str, Any] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line: a training step or an evaluation."""
        step = int(record["step"])
        when, times = record.get("time"), self._times
        seconds = float(record.get("seconds", 0.0))
        if isinstance(when, float):
            self._times = [min(times[0], when - seconds), max(times[1], when)] if times else [when - seconds, when]
        if "validation_loss" in record:
            self.run.validation.append((step, float(record["validation_loss"])))
            self._evaluating += seconds
            return
        self._last = dict(record)
        for name, series in self.run.series.items():
            if name in record:
                series.add(step, float(record[name]))
        if not record.get("skipped"):
            self._applied += seconds
        heapq.heappush(self._recent, (step, seconds))
        if len(self._recent) > SAMPLE:
            heapq.heappop(self._recent)

    def finish(self) -> None:
        """Set the facts of the run, by the events that are known by then. More lines may follow."""
        self.run.facts = _facts(
            self.run, self._last, self._times, self._recent, applied=self._applied, evaluating=self._evaluating
        )


def _read_metrics(run: RunData, path: Path) -> None:
    sums = MetricsSums(run)
    for record in read_metrics(path, lambda _: run.leave_out(FILE_NAME)):
        sums.add(record)
    sums.finish()


def _facts(run: RunData, last: Mapping[str, Any], times: list[float], recent: list[tuple[int, float]], *,
           applied: float, evaluating: float) -> dict[str, float]:
    facts: dict[str, float] = {}
    for fact in facts_of(run.metrics):
        value = _summary(fact, run.series.get(fact.name), last)
        if value is not None:
            facts[fact.name] = value
    if run.validation:
        facts["validation_loss"] = run.validation[-1][1]
        facts["best_validation_loss"] = min(v for _, v in run.validation)
    later = [seconds for _, seconds in sorted(recent)][1:] or [seconds for _, seconds in recent]
    if later:
        facts["seconds_per_step"] = statistics.median(later)
    starts = [float(e["time"]) for e in run.events if e.get("event") == "start" and isinstance(e.get("time"), float)]
    ends = [float(e["time"]) for e in run.events if isinstance(e.get("time"), float)]
    if times:
        begin, end = min([times[0], *starts]), max([times[1], *ends])
        facts["wall_seconds"] = end - begin
        facts["attempts"] = float(max(len(starts), 1))
        if end > begin:
            facts["goodput"] = min(applied / (end - begin), 1.0)
            facts["evaluation_share"] = evaluating / (end - begin)
    return facts


def _summary(fact: Fact, series: Series | None, last: Mapping[str, Any]) -> float | None:
    """Return what a fact says of the values of its metric; None: it is of the whole run, or nothing is known."""
    if fact.of == "last":
        return float(last[fact.name]) if fact.name in last else None
    if series is None or not fact.of:
        return None
    if fact.of == "max":
        return max((b.most for b in series.buckets), default=None)
    return series.mean if fact.of == "mean" else series.last


def _object(run: RunData, name: str, cls: type[T]) -> T | None:
    """Return a file of one object; None: it is not there, or it is counted among what is not believed."""
    found, fault = read_optional(run.folder / name, cls)
    if fault:
        run.leave_out(name, fault.partition(": ")[2] or fault)
    return found


def _lines(run: RunData, name: str, cls: type) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that have the fields of ``cls``, as tables; others are counted and passed over."""
    try:
        with open(open_regular(run.folder / name, follow=True), encoding="utf-8", errors="replace") as stream:
            for number in range(1, MOST_EVENTS + 1):
                line = stream.readline(LINE_BYTES)
                if not line:
                    return
                try:
                    value = parse_json(line)
                    typed(cls, value)
                    yield value
                except WrongContent as error:
                    if line.strip():
                        run.leave_out(name, f"line {number}: {error}")
    except FileNotFoundError:
        return
    except OSError as error:
        run.leave_out(name, error.strerror or str(error))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
