"""Console, TensorBoard, picture, and that none of them can stop a run."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_port.core.config.schema import RunConfig, TelemetryConfig, TrainingConfig
from megatron_port.ext.telemetry import sinks
from megatron_port.ext.telemetry.console import LiveConsole, PlainConsole, duration, make_console
from megatron_port.ext.telemetry.metrics import MetricsWriter, read_metrics
from megatron_port.ext.telemetry.numbers import quantity
from megatron_port.ext.telemetry.sinks import Telemetry
from megatron_port.tools.report.picture import Curves, draw_loss, loss_picture, read_curves, smoothed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make(folder: Path, warnings: list[str], *, tensorboard: bool = False, **options: Any) -> Telemetry:
    config = RunConfig(training=TrainingConfig(steps=20), telemetry=TelemetryConfig(tensorboard=tensorboard))
    settings: dict[str, Any] = {"is_rank_zero": True, "stream": io.StringIO(), "warn": warnings.append}
    return Telemetry(folder, config, **{**settings, **options})


def test_plain_lines() -> None:
    out = io.StringIO()
    console = make_console(total_steps=20, log_interval=10, stream=out)
    assert isinstance(console, PlainConsole)
    for step in range(1, 21):
        console.write({"step": step, "loss": 2.5, "learning_rate": 3e-4, "skipped": step == 7, "mfu": 0.4321,
                       "tokens_per_second": 12345.6, "grad_norm": None})
    console.write({"step": 20, "validation_loss": 2.25})
    console.close()
    lines = out.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "step 1/20", "step 7/20", "step 10/20", "step 20/20", "evaluation after step 20/20"
    ]
    assert lines[0] == "step 1/20 | loss 2.5000 | lr 3.000e-04 | tokens/s 12.3k | MFU 43.2 %"
    assert "skipped this step" in lines[1] and "\x1b" not in out.getvalue()


def spiked(step: int) -> float:
    """A loss that falls from 5 and is 9.4 at step 14, as the first quick start's was."""
    return 9.4 if step == 14 else 5.0 - step / 20


def test_a_spike_between_two_lines_is_shown() -> None:
    out = io.StringIO()
    console = make_console(total_steps=40, log_interval=10, stream=out)
    for step in range(1, 41):
        console.write({"step": step, "loss": float("nan") if step == 33 else spiked(step), "grad_norm": 1.0})
    lines = out.getvalue().splitlines()
    assert lines[1].startswith("step 10/40 | loss 4.5000 | grad")
    assert lines[2].startswith("step 20/40 | loss 4.0000 | peak 9.4000 at step 14 | grad")
    assert lines[3].startswith("step 30/40 | loss 3.5000 | grad")  # an interval reports its own peak alone
    assert lines[4].startswith("step 40/40 | loss 3.0000 | peak nan at step 33 |")


def test_noise_between_two_lines_is_no_peak() -> None:
    out = io.StringIO()
    console = make_console(total_steps=30, log_interval=10, stream=out)
    for step in range(1, 31):
        console.write({"step": step, "loss": 3.0 + 0.2 * (step % 3) - step / 100})
    assert "peak" not in out.getvalue() and len(out.getvalue().splitlines()) == 4


def test_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    console = make_console(total_steps=100, stream=out, name="demo")
    assert isinstance(console, LiveConsole)
    for step in range(1, 31):
        console.write({"step": step, "loss": step / 8, "seconds": 2.0})
    console.write({"step": 30, "validation_loss": 2.25})
    console.close()
    last = out.getvalue().rsplit("demo: step", 1)[1]
    assert last.startswith(" 30 of 100, 00:02:20 to go")
    assert "peak" not in last and "3.7500" in last and "validation loss 2.2500 after step 30" in last
    assert " 18 " not in last and " 19 " in last


@pytest.mark.parametrize("term", ["dumb", "missing rich"])
def test_terminals_that_cannot(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", "dumb" if term == "dumb" else "xterm")
    if term != "dumb":
        monkeypatch.setitem(sys.modules, "rich.live", None)
    assert isinstance(make_console(total_steps=1, stream=Terminal()), PlainConsole)


def test_only_the_speaker_writes(tmp_path: Path) -> None:
    out = io.StringIO()
    telemetry = make(tmp_path / "run", [], is_rank_zero=False, stream=out)
    telemetry.step({"step": 1, "loss": 1.0})
    telemetry.close()
    assert not (tmp_path / "run").exists() and out.getvalue() == ""


def test_all_sinks(tmp_path: Path) -> None:
    warnings: list[str] = []
    telemetry = make(tmp_path, warnings, tensorboard=True)
    for step in (1, 2):
        telemetry.step({"step": step, "loss": 1.0 / step, "grad_norm": None})
    telemetry.evaluation(step=2, validation_loss=0.75)
    telemetry.close()
    telemetry.close()
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [{k: v for k, v in r.items() if k != "time"} for r in records] == [
        {"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 2, "validation_loss": 0.75}
    ]
    assert all(r["time"] > 1e9 for r in records) and warnings == []

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(1, 1.0), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("loss/validation")] == [(2, 0.75)]


def test_no_tensorboard_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    warnings: list[str] = []
    telemetry = make(tmp_path, warnings, tensorboard=True)
    for step in (1, 2, 3):
        telemetry.step({"step": step, "loss": 1.0})
    telemetry.close()
    assert len(warnings) == 1 and "pip install tensorboard" in warnings[0]
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 3


def test_a_sink_that_fails_is_left_out(tmp_path: Path) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("reader is gone")

    warnings: list[str] = []
    telemetry = make(tmp_path, warnings, stream=Broken())
    for step in (1, 2, 3):
        telemetry.step({"step": step, "loss": 1.0})
    telemetry.close()
    assert len(warnings) == 1 and "PlainConsole" in warnings[0]
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 3


def test_a_full_disk_delays_lines_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = True
    write = MetricsWriter.write

    def sometimes(self: MetricsWriter, record: Any) -> None:
        if full and record["step"] > 1:
            raise OSError(28, "No space left on device")
        write(self, record)

    monkeypatch.setattr(sinks.MetricsWriter, "write", sometimes)  # type: ignore[attr-defined]
    warnings: list[str] = []
    telemetry = make(tmp_path, warnings)
    for step in range(1, 5):
        telemetry.step({"step": step, "loss": 1.0})
    assert len(warnings) == 1 and "No space left" in warnings[0]
    full = False
    telemetry.step({"step": 5, "loss": 1.0})
    telemetry.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert len(warnings) == 2


def test_a_wrong_record_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    telemetry = make(tmp_path, [])
    with pytest.raises(ValueError, match="lossy"):
        telemetry.step({"step": 1, "lossy": 1.0})


def drawn(svg: str) -> ElementTree.Element:
    """The picture as a tree; its style sheet names no variable that a viewer of SVG would have to know."""
    assert "var(" not in svg and "nan" not in svg
    return ElementTree.fromstring(re.sub(' xmlns="[^"]*"', "", svg, count=1))


def words(tree: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in tree.iter("text")]


def test_picture(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    assert not draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.svg")
    writer.write({"step": 0, "validation_loss": 4.5})
    for step in range(1, 301):
        writer.write({"step": step, "loss": float("nan") if step == 9 else 4.0 / step, "tokens": 10 * step})
    writer.write({"step": 300, "validation_loss": 0.5})
    writer.close()
    curves = read_curves(tmp_path / "metrics.jsonl")
    assert len(curves.training) == 299 and curves.lost == {9}
    assert curves.validation == {0: 4.5, 300: 0.5} and curves.tokens == 3000
    assert draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.svg")
    plain = words(drawn((tmp_path / "loss.svg").read_text()))
    assert {"validation", "0.500", "step (the last after 3k tokens)", "training (mean of 5 steps)"} <= set(plain)
    assert draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.svg", unigram_entropy=3.0, title="run")
    named = words(drawn((tmp_path / "loss.svg").read_text()))
    assert set(named) - set(plain) == {"unigram entropy 3.000", "run"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.svg", "metrics.jsonl"]


@pytest.mark.parametrize("steps", [150, 400])
def test_the_picture_shows_every_step(steps: int) -> None:
    curves = Curves(training={s: spiked(s) for s in range(1, steps + 1) if s != 20}, lost={20})
    tree = drawn(loss_picture(curves))
    raw = next(line for line in tree.iter("polyline"))
    places = [tuple(map(float, pair.split(","))) for pair in raw.get("points", "").split()]
    assert len(places) == len(curves.training) and places == sorted(places)
    peak = min(places, key=lambda place: place[1])
    assert places.index(peak) == sorted(curves.training).index(14) and "9.400 at step 14" in words(tree)
    assert "training loss not finite (1)" in words(tree)
    (mark,) = (line for line in tree.iter("line") if line.get("class") == "mark bad")
    before, after = places[18], places[19]  # steps 19 and 21
    assert float(mark.get("x1", 0)) == pytest.approx((before[0] + after[0]) / 2, abs=0.1)
    falling = words(drawn(loss_picture(Curves(training={s: 5.0 / s for s in range(1, steps + 1)}))))
    assert not any("at step" in text or "finite" in text for text in falling)


def test_a_step_that_was_run_again_counts_as_its_last_line(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step, loss in ((1, 4.0), (2, float("nan")), (3, 3.0), (2, 3.5), (3, float("inf"))):
        writer.write({"step": step, "loss": loss})
    writer.close()
    curves = read_curves(tmp_path / "metrics.jsonl")
    assert curves.training == {1: 4.0, 2: 3.5} and curves.lost == {3}


def test_smoothing_and_text() -> None:
    assert smoothed([1.0, 2.0, 9.0, 4.0, 5.0], 3) == pytest.approx([1.0, 4.0, 5.0, 6.0, 5.0])
    line = [float(i) for i in range(20)]
    assert smoothed(line, 9) == pytest.approx(line)
    assert [quantity(v) for v in (7, 12345.6, 999_900, 1.5e9, 0.5)] == ["7", "12.3k", "1000k", "1.5G", "0.5"]
    assert duration(93784) == "1 d 02:03:04"
