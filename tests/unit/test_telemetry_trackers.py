"""Weights & Biases and MLflow get the same numbers, offline, and can neither stop nor slow a run."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_port.core.config.schema import OptimizerConfig, RunConfig, TelemetryConfig, TrainingConfig
from megatron_port.ext.telemetry import trackers as background
from megatron_port.ext.telemetry.metrics import read_metrics
from megatron_port.ext.telemetry.sinks import Telemetry
from megatron_port.ext.telemetry.trackers import BackgroundSink


def run(folder, warn, trackers, steps=5, resumed=0):
    config = RunConfig(
        name="demo", training=TrainingConfig(steps=steps), telemetry=TelemetryConfig(**trackers, project="proj"),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    telemetry = Telemetry(folder, config, is_rank_zero=True, resumed_step=resumed, warn=warn,
                          stream=open("/dev/null", "w"))  # noqa: SIM115
    for step in range(1, steps + 1):
        telemetry.step({"step": step, "loss": 2.0 / step, "tokens": step * 10, "skipped": False,
                        "grad_norm": float("inf") if step == 2 else 1.0})
    telemetry.evaluation(step=steps, validation_loss=0.5)
    telemetry.close()
    assert len(list(read_metrics(folder / "metrics.jsonl"))) == steps + 1


class Recorder:
    """Stands for a library: keeps what it is given."""

    def __init__(self):
        self.lines, self.settings, self.finished = [], {}, False
        self.Settings = dict

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, values, step):
        self.lines.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_is_offline_and_gets_every_step(tmp_path, monkeypatch):
    fake = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    warned = []
    run(tmp_path, warned.append, {"wandb": "offline", "mlflow": "off"})
    assert warned == [] and fake.finished
    assert fake.settings["mode"] == "offline" and fake.settings["dir"] == str(tmp_path) and fake.settings["id"] is None
    assert fake.settings["config"]["optimizer.lr"] == 1e-3 and fake.settings["project"] == "proj"
    assert [s for s, _ in fake.lines] == [1, 2, 3, 4, 5, 5]
    assert fake.lines[0][1]["loss/train"] == 2.0 and "optimizer/grad_norm" not in fake.lines[1][1]
    assert fake.lines[-1][1] == {"loss/validation": 0.5}


def test_a_missing_library_says_how_to_get_it(tmp_path, monkeypatch):
    warned = []
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        monkeypatch.setitem(sys.modules, name, None)
        run(tmp_path / name, warned.append, {name: "offline"})
        assert f"pip install {package}" in warned[-1] and "is off from here on" in warned[-1]
    assert len(warned) == 2


@pytest.mark.parametrize("error", [RuntimeError("no key"), SystemExit(1), KeyboardInterrupt()])
def test_a_tracker_that_fails_is_left_alone(tmp_path, monkeypatch, error):
    class Failing(Recorder):
        def log(self, values, step):
            if step == 3:
                raise error
            super().log(values, step)

    fake = Failing()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    warned = []
    run(tmp_path, warned.append, {"wandb": "offline"})
    assert len(warned) == 1 and type(error).__name__ in warned[0] and len(fake.lines) == 2


def test_a_tracker_that_hangs_is_left_behind():
    release, warned = threading.Event(), []

    def make():
        release.wait(20)
        raise RuntimeError("late")

    sink = BackgroundSink("slow", make, warned.append, close_s=0.1)
    started = time.perf_counter()
    for step in range(200):
        sink.write({"step": step})
    assert time.perf_counter() - started < 1.0
    sink.close()
    assert time.perf_counter() - started < 5.0 and "did not finish within 0.1 s" in warned[0]
    release.set()


def test_a_full_queue_drops_the_oldest(monkeypatch):
    monkeypatch.setattr(background, "BACKLOG", 4)
    release, seen, warned = threading.Event(), [], []

    class Sink:
        def write(self, record):
            seen.append(record["step"])

        def close(self):
            pass

    def make():
        release.wait(20)
        return Sink()

    sink = BackgroundSink("slow", make, warned.append)
    for step in range(10):
        sink.write({"step": step})
    release.set()
    sink.close()
    assert seen[-1] == 9 and len(seen) >= 3 and "could not keep up" in warned[0]


def test_real_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")  # ours wins
    warned = []
    run(tmp_path, warned.append, {"wandb": "offline"})
    assert warned == []
    files = [p.name for p in Path(tmp_path, "wandb").rglob("*.wandb")]
    assert len(files) == 1 and (tmp_path / "wandb").is_dir()


def test_real_mlflow_offline(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    warned = []
    run(tmp_path, warned.append, {"mlflow": "offline"})
    run(tmp_path / "second", warned.append, {"mlflow": "offline"}, steps=150)
    assert warned == []
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").absolute().as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("proj").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["optimizer.lr"] == "0.001"
    assert [m.value for m in client.get_metric_history(found.info.run_id, "loss/train")] == [2 / s for s in range(1, 6)]
    assert len(client.get_metric_history(found.info.run_id, "optimizer/grad_norm")) == 4
