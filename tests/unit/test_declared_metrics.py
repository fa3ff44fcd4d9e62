"""Metrics that plugins declare: in every output, and in the run's folder for readers that import no plugin."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_port import load_config, run_training
from megatron_port.core.data.objective import Objective
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import OBJECTIVES
from megatron_port.ext.telemetry.console import cells
from megatron_port.ext.telemetry.metrics import (
    DECLARED_FILE,
    MetricsWriter,
    encode,
    known_metrics,
    read_metrics,
    write_declared,
)
from megatron_port.ext.telemetry.step_metrics import CHARTS, METRICS, OWN, Chart, Metric, declare, step_metrics
from megatron_port.ext.telemetry.trackers import finite
from megatron_port.tools.live.server import FollowedRun, sections
from megatron_port.tools.report.run_data import read_run
from megatron_port.tools.report.run_report import render

ROOT = Path(__file__).resolve().parents[2]
NORM = Metric("a_norm", float, unit="m", label="a norm", form="{:.2f}", chart="A norm", summary="max", help="Its norm.")
COUNT = Metric("a_count", int, help="Shown nowhere but in metrics.jsonl and the trackers.")
SHARE = Metric("a_share", float, label="share", form="{:.1f} %", factor=100.0, tag=None, hidden=0.0,
               chart=Chart("A share (%)", zero=True), curve="mine", summary="mean")


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METRICS, "_added", {})
    declare(NORM, COUNT, SHARE)


def written(folder: Path) -> Path:
    """A run of three steps, whose writer declared the metrics."""
    write_declared(folder, lambda: None)
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in (1, 2, 3):
        writer.write({"step": step, "loss": 3.0, "a_norm": 1.25 * step, "a_count": step, "a_share": 0.5, "time": 1e9})
    writer.close()
    return folder


def test_the_writing_process_shows_them(declared: None) -> None:
    record: dict[str, Any] = {"step": 1, "loss": 2.0, "a_norm": 1.234, "a_count": 7, "a_share": 0.5}
    assert cells(record) == {"loss": "2.0000", "a norm": "1.23", "share": "50.0 %"}
    assert "share" not in cells(record | {"a_share": 0.0})
    assert finite(record) == {"loss/train": 2.0, "a_norm": 1.234, "a_count": 7.0}
    assert encode(record) == '{"step": 1, "loss": 2.0, "a_norm": 1.234, "a_count": 7, "a_share": 0.5}'
    with pytest.raises(ValueError, match="a_count is"):
        encode(record | {"a_count": 7.5})


def test_readers_know_them_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METRICS, "_added", {})
    with monkeypatch.context() as there:
        there.setattr(METRICS, "_added", {m.name: m for m in (NORM, COUNT, SHARE)})
        folder = written(tmp_path / "run")
    assert list(step_metrics()) == [metric.name for metric in OWN]  # this process has imported no plugin
    found = known_metrics(folder)
    assert found["a_count"] == COUNT and found["a_norm"].drawn == Chart("A norm", form="{:.2f}")
    assert [row["a_norm"] for row in read_metrics(folder / "metrics.jsonl")] == [1.25, 2.5, 3.75]
    run = read_run(folder)
    assert run.facts["a_norm"] == 3.75 and run.facts["a_share"] == 0.5 and "a_count" not in run.facts
    page = render([run])
    for text in ("A norm", "a norm, maximum (m)", "3.75", "A share (%)", "share, mean", "50.0 %"):
        assert text in page, text
    follower = FollowedRun(folder)
    follower.poll()
    assert "A norm" in sections(follower)["charts"]
    (folder / DECLARED_FILE).unlink()  # then they are fields of another version
    assert next(iter(read_metrics(folder / "metrics.jsonl"))) == {"step": 1, "loss": 3.0, "time": 1e9}
    write_declared(folder, lambda: None)
    assert not (folder / DECLARED_FILE).exists()  # nothing is declared


def test_an_attempt_without_the_plugin_keeps_what_was_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METRICS, "_added", {"a_norm": NORM})
    write_declared(tmp_path, lambda: None)
    monkeypatch.setattr(METRICS, "_added", {"a_count": COUNT})
    write_declared(tmp_path, lambda: None)
    monkeypatch.setattr(METRICS, "_added", {})
    before = (tmp_path / DECLARED_FILE).read_bytes()
    write_declared(tmp_path, lambda: pytest.fail("nothing is written"))
    assert (tmp_path / DECLARED_FILE).read_bytes() == before
    assert list(known_metrics(tmp_path))[-2:] == ["a_norm", "a_count"]


GOOD = {"name": "good", "type": "float"}


@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"metrics": 3}', json.dumps({"metrics": [GOOD, {"name": "x", "type": "complex"}]}),
    json.dumps({"metrics": [{"type": "float"}]}), "[" * 5000, json.dumps({"metrics": [GOOD], "more": "x" * (1 << 20)}),
])
def test_a_damaged_file_declares_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / DECLARED_FILE).write_text(content)
    assert list(known_metrics(tmp_path)) == [metric.name for metric in OWN]


def test_a_hostile_file_changes_no_own_metric_and_formats_nothing_large(tmp_path: Path) -> None:
    script = "<script>alert({})</script>".format
    bad = [
        {**GOOD, "name": "loss", "label": "not it"}, {**GOOD, "form": "{:.99999999f}"}, {**GOOD, "form": "{0.real}"},
        {**GOOD, "name": "<script>"},
        {**GOOD, "name": "fine", "label": script(1), "chart": script(2), "summary": "last"},
    ]
    (tmp_path / DECLARED_FILE).write_text(json.dumps({"metrics": bad}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "fine": 2.0, "good": 1.0}\n')
    found = known_metrics(tmp_path)
    assert found["loss"] in OWN and list(found)[len(OWN):] == ["fine"]
    page = render([read_run(tmp_path)])
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page and "&lt;script&gt;alert(2)" in page


@pytest.mark.parametrize(("change", "says"), [
    ({"name": "Bad"}, "the name 'Bad'"), ({"name": ""}, "the name ''"), ({"type": str}, "use float, int or bool"),
    ({"form": "{} of {}"}, "the form '{} of {}'"), ({"form": "{:.123f}"}, "is none"), ({"form": "{x}"}, "is none"),
    ({"chart": Chart("x", form="{x}")}, "is none"),
])
def test_what_may_be_declared(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(COUNT, **change)


def test_names_are_not_taken_twice(declared: None) -> None:
    with pytest.raises(ConfigError, match="metric 'loss' is megatron_port's own"):
        declare(Metric("loss", float))
    with pytest.raises(ConfigError, match="metric 'a_norm' is registered twice"):
        declare(Metric("a_norm", float))


def test_every_chart_of_the_package_is_some_metrics() -> None:
    assert {metric.drawn for metric in OWN if metric.drawn} == set(CHARTS)
    assert len({metric.tag for metric in OWN if metric.tag}) == sum(bool(metric.tag) for metric in OWN)


def test_what_an_objective_declares_is_recorded(
    declared: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing but its ``metrics``; what is not known is left out."""

    class Counting(Objective):
        def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float | None]:
            return {"a_norm": count / 4, "a_count": None}

    monkeypatch.setitem(OBJECTIVES._added, "counting", Counting)
    config = load_config(ROOT / "examples" / "tiny.toml", f"output_dir={tmp_path}", "training.steps=2")
    run_training(dataclasses.replace(config, training=dataclasses.replace(config.training, loss="counting")))
    rows = [row for row in read_metrics(tmp_path / "example" / "metrics.jsonl") if "loss" in row]
    assert [row["a_norm"] for row in rows] == [8 * 16 / 4] * 2 and not any("a_count" in row for row in rows)
    assert "A norm" in render([read_run(tmp_path / "example")])
