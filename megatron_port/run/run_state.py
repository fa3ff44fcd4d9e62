"""What became of a run, from the last lines of its files: for lists of runs and for the live page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.io.files import open_regular, read_regular
from megatron_port.core.io.typed_json import Natural, Seconds, WrongContent, parse_json, read_optional, typed
from megatron_port.ext.telemetry.metrics import FILE_NAME, decode, known_metrics
from megatron_port.run.lease import Life, life_of
from megatron_port.run.run_files import FINISHED, OUTCOME, SAVED, AttemptOutcome

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

RUNNING, FAILED, ENDED, NEW = "running", "failed", "ended", "new"
CONFIG_BYTES = 1 << 20
"""More than any config.toml has."""
TAIL_BYTES = 1 << 16
RECENT_S = 120.0
"""A run on a host that cannot be asked is taken to run if its last line is no older."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Fields that readers use of a line of ``events.jsonl``; a line has more."""

    event: str = ""
    time: Seconds = 0.0
    step: Natural | None = None
    message: str = ""
    run: str = ""
    config_hash: str = ""


@dataclass(frozen=True)
class RunState:
    """A run as its folder shows it. What is not known is None."""

    folder: Path
    status: str
    """running | finished | saved (on a signal) | failed | ended (without a word) | new (no step yet)"""
    step: int = 0
    steps: int | None = None
    """``training.steps``."""
    loss: float | None = None
    validation_loss: float | None = None
    seconds: float | None = None
    """Seconds of the last step."""
    time: float | None = None
    """When the last line was written, in seconds since 1970."""
    why: str = ""
    """The signal, or what failed."""
    left_out: str = ""
    """Damaged lines and fields of a file, which are left out."""

    def body(self) -> dict[str, Any]:
        """Return the fields as JSON types, with the run's name."""
        return {"name": self.folder.resolve().name, **asdict(self), "folder": str(self.folder)}

    def next_step(self) -> str:
        """Return what a user would do next, as a sentence."""
        if self.status == RUNNING:
            return f"it trains; `megatron-port watch {self.folder}` shows it"
        if self.status == FINISHED:
            return (f"it is finished; `megatron-port train {self.folder} --set training.steps={2 * max(self.step, 1)}` "
                    "trains it further")
        return f"`megatron-port train {self.folder}` resumes it from its newest checkpoint"


def run_state(folder: Path) -> RunState:
    """Return the state of the run in ``folder``; constant time, whatever the length of its files."""
    train, validation = _last_records(folder / FILE_NAME)
    newest = max((r for r in (train, validation) if r), key=lambda r: r.get("time", 0.0), default={})
    outcome, fault = read_optional(folder / OUTCOME, AttemptOutcome)
    event = next((e for e in _tail(folder / "events.jsonl") if e.event in ("failed", "start", "finished")), RunEvent())
    steps = _steps(folder / "config.toml")
    step = int(train.get("step", 0))
    when = newest.get("time")
    status, why = _status(folder, outcome or AttemptOutcome(), event, step=step, steps=steps, when=when)
    return RunState(
        folder, status, step=step, steps=steps, loss=train.get("loss"),
        validation_loss=validation.get("validation_loss"), seconds=train.get("seconds"), time=when, why=why,
        left_out=fault,
    )


def _status(
    folder: Path, outcome: AttemptOutcome, event: RunEvent, *, step: int, steps: int | None, when: float | None
) -> tuple[str, str]:
    life = life_of(folder)
    recent = when is not None and time.time() - when < RECENT_S
    if life is Life.RUNS or (life is Life.UNKNOWN and recent):
        return RUNNING, ""
    if outcome.status == FINISHED and (steps is None or outcome.step >= steps):
        return FINISHED, ""
    if event.event == FAILED and event.time >= outcome.time:
        return FAILED, event.message[:200]
    if outcome.status == SAVED and outcome.step >= step:
        return SAVED, outcome.signal
    return (ENDED, "") if step else (NEW, "")


def _last_records(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last line of a training step and the last of an evaluation, empty where there is none."""
    train: dict[str, Any] = {}
    validation: dict[str, Any] = {}
    known = known_metrics(path.parent)
    for line in _tail_lines(path):
        record = decode(line, known)
        if record is None:
            continue
        if "validation_loss" in record:
            validation = validation or dict(record)
        else:
            train = train or dict(record)
        if train and validation:
            break
    return train, validation


def _tail(path: Path) -> Iterator[RunEvent]:
    """Yield the events of a file of them, the last first, as far as its last bytes hold them."""
    for line in _tail_lines(path):
        with contextlib.suppress(WrongContent):  # ``report`` counts them
            yield typed(RunEvent, parse_json(line))


def _tail_lines(path: Path) -> Iterator[str]:
    try:
        with open(open_regular(path, follow=True), "rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - TAIL_BYTES))
            data = stream.read(TAIL_BYTES)
    except OSError:
        return
    lines = data.decode("utf-8", "replace").split("\n")
    yield from reversed(lines if size <= TAIL_BYTES else lines[1:])


def _steps(path: Path) -> int | None:
    try:
        value = tomllib.loads(read_regular(path, CONFIG_BYTES).decode())["training"]["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if type(value) is int else None
