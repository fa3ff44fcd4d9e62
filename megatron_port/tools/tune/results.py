"""The results file of a tuning: one JSON object a line, the first says of what. It is rewritten whole, atomically."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import write_output
from megatron_port.core.io.typed_json import Natural, Rows, Seconds, read_rows

FORMAT = 1
RESULTS_FILE = "results.jsonl"
OK, OUT_OF_MEMORY, FAILED, TIMEOUT = "ok", "oom", "failed", "timeout"
_FREE = (
    "layout.tensor_parallel_size", "layout.pipeline_parallel_size", "layout.virtual_pipeline_size",
    "layout.data_parallel_size", "layout.sequence_parallel", "activations.policy", "layout.zero_stage",
    "layout.pipeline_schedule", "layout.pipeline_split", "batch.micro_batch_size", "cluster.nodes",
)
_OF_NO_MATTER = ("name", "output_dir", "launch.", "telemetry.", "checkpoint.", "watch.", "preflight.", "hardware.",
                 "calibration.")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Trial of one layout."""

    key: str
    world: Natural
    """Devices."""
    parameters: dict[str, Any]
    """``tune.strategies.PARAMETERS``."""
    settings: dict[str, Any]
    """Leaves of the configuration."""
    planned_seconds: float
    planned_bytes: float
    status: str
    """ok | oom | failed | timeout"""
    seconds: float | None = None
    """Measured, of one step: the median; with several starts the median of theirs."""
    spread: float | None = None
    """(largest − smallest) ÷ median of the measured steps; with several starts of the starts' medians."""
    runs: tuple[float, ...] = ()
    """Measured, of one step: the median of each start (``tune.tuner``)."""
    memory_bytes: Natural | None = None
    """As metrics.jsonl has it (rank 0; on a CPU the resident size of its process)."""
    model_tflops: float | None = None
    """Model TFLOP/s of one device."""
    tokens_per_second: float | None = None
    error: str = ""
    command: str = ""
    wall_seconds: float = 0.0
    time: Seconds = 0.0

    @property
    def starts(self) -> tuple[float, ...]:
        """``runs``; of files from before starts were counted the one that there was."""
        return tuple(self.runs) or (() if self.seconds is None else (self.seconds,))


@dataclass(frozen=True, kw_only=True)
class ResultsHead:
    """The first line of the file."""

    format: int = 0
    run: str = ""
    name: str = ""


def key_of(settings: dict[str, Any], world: int) -> str:
    """Return 12 hex digits that name a layout on so many devices."""
    text = json.dumps([world, {k: settings[k] for k in sorted(settings)}], default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_key(config: RunConfig, steps: int) -> str:
    """Return 16 hex digits of what comparable trials share: the run but for its layout, and the trial's steps."""
    kept = {
        name: toml_value(value) for name, value in leaves(config)
        if name not in _FREE and not name.startswith(_OF_NO_MATTER)
    }
    return hashlib.sha256(json.dumps([steps, kept], sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Results:
    """Results of the trials so far."""

    path: Path
    run: str
    name: str
    trials: dict[str, Trial] = field(default_factory=dict)
    left_out: str = ""
    """Lines of the file that no tuning writes, in words; they are gone once a trial is added."""

    @classmethod
    def open(cls, folder: Path, config: RunConfig, steps: int, *, fresh: bool = False) -> Results:
        """Return the results of ``folder``, empty where there are none; the folder is made.

        Raises:
            ConfigError: they are of another run, or of trials of another length.
            EnvironmentFault: the folder cannot be made or read.
        """
        path, run = folder / RESULTS_FILE, run_key(config, steps)
        out = cls(path, run, config.name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            heads = Rows[ResultsHead](path.name) if fresh else read_rows(path, ResultsHead)
        except OSError as error:
            raise EnvironmentFault(f"{path}: {error.strerror or error}") from None
        head = next((row for row in heads.rows if row.format or row.run), None)
        if head is None and not heads.rows and not heads.bad:
            return out
        if head is None or head.format != FORMAT or head.run != run:
            whose = repr(head.name) if head is not None and head.name else "another run"
            raise ConfigError(
                f"{path} holds trials of {whose} that cannot be compared with this one's "
                "(another model, batch, precision, engine, or number of steps); give another --out, or --fresh to "
                "begin anew"
            )
        read = read_rows(path, Trial, skip=1)
        out.trials, out.left_out = {trial.key: trial for trial in read.rows}, read.note()
        return out

    def add(self, trial: Trial) -> None:
        """Keep a trial: the file is written under a temporary name, synced and renamed. Raises EnvironmentFault."""
        self.trials[trial.key] = trial
        rows: list[dict[str, Any]] = [{"format": FORMAT, "run": self.run, "name": self.name}]
        rows += [asdict(t) for t in self.trials.values()]
        write_output(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def ranked(self) -> list[Trial]:
        """Return the trials that worked, by tokens per second and device, best first."""
        good = [t for t in self.trials.values() if t.status == OK and t.model_tflops is not None]
        return sorted(good, key=lambda t: -(t.model_tflops or 0.0))
