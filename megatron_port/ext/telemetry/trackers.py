"""TensorBoard, Weights & Biases and MLflow: the numbers of metrics.jsonl under the same tags. All optional.

Offline is the default of the latter two: files below the run's folder, no account, no network. ``wandb sync`` and
MLflow's own tools publish them later. Addresses and keys come from the libraries' own variables, which are not read
here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_port.core.config.dump import leaves
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.io.step_metrics import step_metrics
from megatron_port.ext.telemetry.background import BackgroundSink
from megatron_port.ext.telemetry.metrics import Record

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
