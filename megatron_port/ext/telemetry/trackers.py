"""TensorBoard, Weights & Biases and MLflow: the numbers of metrics.jsonl under the same tags. All optional.

Offline is the default of the latter two: files below the run's folder, no account, no network. ``wandb sync`` and
MLflow's own tools publish them later. Addresses and keys come from the libraries' own variables, which are not read
here.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_port.core.config.dump import leaves
from megatron_port.core.config.schema import RunConfig
from megatron_port.ext.telemetry.metrics import Record
from megatron_port.ext.telemetry.step_metrics import step_metrics

# A sink behind a queue: what it does, however long it takes, costs the training loop an append.
#
# Trackers start programs, open connections and wait for servers. All of that happens on a thread of its own, started
# with the first record. A tracker that fails is reported once and left alone; one that hangs is left behind.

BACKLOG = 10_000
"""Records that wait at most; the oldest go first."""
CLOSE_S = 30.0
"""How long the end of a run waits for a tracker."""


class BackgroundSink:
    """Passes records to a sink that ``make`` builds, on a thread.

    Args:
        name: for messages.
        make: builds the sink (imports, log-in, files); whatever it raises switches the tracker off.
        warn: takes a line.
    """

    def __init__(self, name: str, make: Callable[[], Any], warn: Callable[[str], None], *,
                 close_s: float = CLOSE_S) -> None:
        self._name, self._make, self._warn, self._close_s = name, make, warn, close_s
        self._records: queue.Queue[Record | None] = queue.Queue(BACKLOG)
        self._dropped = 0
        self._off = False
        self._thread = threading.Thread(target=self._run, name=f"telemetry-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """A training step or an evaluation."""
        self._put(record)

    def close(self) -> None:
        """Give the tracker ``close_s`` to finish; a second call does nothing."""
        if self._thread.is_alive() and not self._off:
            self._put(None)
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                self._warn(f"{self._name} did not finish within {self._close_s:g} s and is left behind; metrics.jsonl "
                           "has everything")
        self._off = True
        if self._dropped:
            self._warn(f"{self._name} could not keep up: {self._dropped} records were not passed on (metrics.jsonl has "
                       "them)")
            self._dropped = 0

    def _put(self, item: Record | None) -> None:
        if self._off:
            return
        while True:
            try:
                self._records.put_nowait(item)
                return
            except queue.Full:
                try:
                    self._records.get_nowait()
                    self._dropped += 1
                except queue.Empty:
                    pass

    def _run(self) -> None:
        try:
            sink = self._make()
            while (item := self._records.get()) is not None:
                sink.write(item)
            sink.close()
        except BaseException as error:  # SystemExit, too: a library may not end a run
            self._off = True
            self._warn(f"{self._name} is off from here on: {type(error).__name__}: {error}")


MLFLOW_BATCH = 100
"""Steps that are sent to MLflow in one call: its file store opens a file for each number."""
PARAMETER_CHARACTERS = 500
"""MLflow's limit for the value of a parameter."""


def tagged(record: Record) -> dict[str, float]:
    """Tag → number of what a record knows."""
    tags = {name: metric.tag or name for name, metric in step_metrics().items() if metric.tag is not None}
    return {tag: float(v) for name, tag in tags.items() if (v := record.get(name)) is not None}


def finite(record: Record) -> dict[str, float]:
    """Tag → number; what is not finite is left out, as neither tracker can draw it."""
    return {tag: value for tag, value in tagged(record).items() if math.isfinite(value)}


class TensorBoardSink:
    """TensorBoard events in ``folder``, as scalars by step. Raises ImportError if TensorBoard is not installed.

    ``resumed_step``: events after it, of an attempt that ended later, are hidden by TensorBoard.
    """

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        board = _library("tensorboard", "torch.utils.tensorboard", off="false")
        self._writer: Any = board.SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def write(self, record: Record) -> None:
        """A training step; an evaluation is shown at once."""
        for tag, value in tagged(record).items():
            self._writer.add_scalar(tag, value, int(record["step"] or 0), walltime=record.get("time"))
        if "validation_loss" in record:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run in ``folder``/wandb. Raises ImportError where wandb is not installed."""

    def __init__(self, folder: Path, config: RunConfig, *, mode: str, resumed_step: int) -> None:
        wandb = _library("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", silent=True, disable_git=True)
        self._run = wandb.init(
            project=config.telemetry.project, name=config.name, dir=str(folder), mode=mode,
            config=dict(leaves(config)), settings=settings,
            # One record there for all attempts of a run; offline, each attempt is a folder and sync joins them.
            id=None if mode == "offline" else config.name, resume=None if mode == "offline" else "allow",
        )

    def write(self, record: Record) -> None:
        """A training step or an evaluation."""
        self._run.log(finite(record), step=int(record["step"] or 0))

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class MLflowSink:
    """An MLflow run: in ``folder``/mlflow, or at the server that MLFLOW_TRACKING_URI names. ImportError: not there."""

    def __init__(self, folder: Path, config: RunConfig, *, mode: str, resumed_step: int) -> None:
        mlflow = _library("mlflow")
        self._entities = import_module("mlflow.entities")
        # The client, not the module's functions: those keep a current run in globals.
        uri = None
        if mode == "offline":
            uri = (folder / "mlflow").absolute().as_uri()
            # Newer versions want a database, and with it three more packages; `mlflow migrate-filestore` makes one.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        project = config.telemetry.project
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        self._id = self._client.create_run(number, run_name=config.name).info.run_id
        self._client.set_tag(self._id, "resumed_step", str(resumed_step))
        parameters = [self._entities.Param(key, str(value)[:PARAMETER_CHARACTERS]) for key, value in leaves(config)]
        for start in range(0, len(parameters), 100):
            self._client.log_batch(self._id, params=parameters[start:start + 100])
        self._waiting: list[Any] = []
        self._steps = 0

    def write(self, record: Record) -> None:
        """A training step; an evaluation is sent at once, with what waits."""
        when, at = int(1000 * float(record.get("time") or 0)), int(record["step"] or 0)
        self._waiting += [self._entities.Metric(tag, value, when, at) for tag, value in finite(record).items()]
        self._steps += 1
        if self._steps >= MLFLOW_BATCH or "validation_loss" in record:
            self._send()

    def close(self) -> None:
        """Send what is left and end the run."""
        self._send()
        self._client.set_terminated(self._id)

    def _send(self) -> None:
        for start in range(0, len(self._waiting), 1000):  # MLflow's limit for a call
            self._client.log_batch(self._id, metrics=self._waiting[start:start + 1000])
        self._waiting, self._steps = [], 0


def _library(name: str, module: str = "", off: str = '"off"') -> Any:
    try:
        return import_module(module or name)
    except ImportError as error:
        package = {"mlflow": "mlflow-skinny"}.get(name, name)
        fix = f"install it with `pip install {package}`, or set telemetry.{name} = {off}"
        raise ImportError(f"{error}; {fix}") from error


def tracker(kind: str, folder: Path, config: RunConfig, *, mode: str, resumed_step: int,
            warn: Callable[[str], None]) -> BackgroundSink:
    """A tracker that cannot stop or slow the run. ``kind``: wandb | mlflow; ``mode``: offline | online."""
    sink = {"wandb": WandbSink, "mlflow": MLflowSink}[kind]
    return BackgroundSink(kind, lambda: sink(folder, config, mode=mode, resumed_step=resumed_step), warn)
