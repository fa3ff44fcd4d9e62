"""The HTML report: right numbers, no network, nothing of a run's text gets into its markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from megatron_port.cli.main import main
from megatron_port.core.errors import ConfigError
from megatron_port.ext.telemetry.metrics import MetricsWriter
from megatron_port.ext.telemetry.numbers import ticks
from megatron_port.tools.charts.page import Mark, line_chart
from megatron_port.tools.charts.page import Series as Curve
from megatron_port.tools.report.run_data import POINTS, Series, read_run
from megatron_port.tools.report.run_report import Comparison, render


class Checked(HTMLParser):
    """Balanced tags, and every attribute value that could load something."""

    VOID = ("meta", "link", "line", "circle", "polyline", "polygon", "rect", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.loads, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [(k, v) for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "action", "data")]
        assert not [k for k, _ in attrs if k.startswith("on")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


@pytest.fixture
def run(tmp_path):
    return make(tmp_path / "alpha")


def make(folder, steps=40, loss=3.0, name="alpha"):
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        writer.write({
            "step": step, "loss": loss / step**0.5, "learning_rate": 1e-3, "loss_scale": 1.0, "skipped": step == 7,
            "skipped_total": int(step >= 7), "anomalies_total": 0, "samples": step * 4, "tokens": step * 400,
            "tokens_per_second": 200.0, "seconds": 2.0, "model_tflops_per_device": 10.0,
            "hardware_tflops_per_device": 12.0, "mfu": 0.25, "hfu": 0.3, "memory_bytes": 5_000_000 + step,
            "fragmentation_bytes": 2_000 - step,
            "grad_norm": float("inf") if step == 7 else 1.0, "time": 1000.0 + 2.5 * step})
    writer.write({"step": steps, "validation_loss": 1.25, "seconds": 1.0, "time": 1000.0 + 2.5 * steps + 1})
    writer.close()
    (folder / "config.toml").write_text(f'name = "{name}"\nengine = "native"\n[optimizer]\nlr = {loss / 3e3}\n')
    events = [{"time": 990.0, "event": "start", "step": 0, "host": "n1", "ranks": 4, "layout": "tp 2 x pp 1 x dp 2"},
              {"time": 1050.0, "event": "start", "step": 20, "host": "n1", "ranks": 4},
              {"time": 1060.0, "event": "anomaly", "step": 22, "reason": "<script>alert(1)</script>"},
              {"time": 1110.0, "event": "finished", "step": steps}]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"torn')
    spread = {"step": 10, "ranks": 4, "least": 1.0, "q1": 1.1, "median": 1.2, "q3": 1.3, "most": 2.5,
              "own_seconds": {"0": 1.0, "1": 1.1, "2": 1.3, "3": 2.5}}
    (folder / "ranks.jsonl").write_text("".join(json.dumps({**spread, "step": s}) + "\n" for s in (10, 20, 30)))
    (folder / "environment.json").write_text(json.dumps({
        "commit": "0123456789abcdef+", "host": "n1", "ranks": 4, "layout": "tp 2 x pp 1 x dp 2", "device": "cpu: x",
        "versions": {"torch": "2.13.0"}, "providers": "norm own"}))
    (folder / "outcome.json").write_text(json.dumps({"status": "finished", "step": steps}))
    return folder


def test_the_numbers(run):
    facts = read_run(run).facts
    assert facts["step"] == 40 and facts["tokens"] == 16000 and facts["skipped_total"] == 1
    assert facts["validation_loss"] == 1.25 and facts["loss"] == pytest.approx(3 / 40**0.5)
    assert facts["mfu"] == 0.25 and facts["attempts"] == 2
    assert (facts["memory_bytes"], facts["fragmentation_bytes"]) == (5_000_040, 1_999)
    # 39 applied steps of 2 s between the first start (990) and the last event (1110).
    assert facts["wall_seconds"] == 120.0 and facts["goodput"] == pytest.approx(78 / 120)
    assert facts["evaluation_share"] == pytest.approx(1 / 120)


def test_the_page(run):
    html = render([read_run(run)])
    page = Checked(html)
    assert page.loads == [("href", "data:,")] and "script" not in page.tags and page.tags.count("svg") == 9
    assert "default-src 'none'" in html and "prefers-color-scheme:dark" in html and "http" not in html.replace(
        "http-equiv", "")
    assert "&lt;script&gt;alert(1)" in html
    text = " ".join(page.texts)
    for expected in ("alpha", "commit 0123456789ab+", "finished at step 40", "1.2500", "65 %", "25 %", "rank 3", "2.5",
                     "started after step 20", "norm own", 'engine = "native"', "1 values were not finite"):
        assert expected in text, expected
    assert "Predicted" not in text


def test_runs_side_by_side(tmp_path, run):
    make(tmp_path / "beta", loss=4.0, name="beta")
    html = render([read_run(run), read_run(tmp_path / "beta")], comparisons={
        "alpha": [Comparison("seconds per step", 1.9, 2.0, "s"), Comparison("memory", None, 5e6, "B")]})
    page = Checked(html)
    text = " ".join(page.texts)
    for expected in ("alpha against beta", "optimizer.lr", "measured ÷ predicted", "1.053"):
        assert expected in text, expected
    assert len(re.findall('class="curve[^>]*stroke:var\\(--c1\\)', html)) >= 5
    again = make(tmp_path / "other" / "alpha")
    names = render([read_run(run), read_run(again)])
    assert str(run) in names and str(again) in names


def test_what_is_missing_is_left_out(tmp_path):
    writer = MetricsWriter(tmp_path / "bare" / "metrics.jsonl")
    writer.write({"step": 1, "loss": 2.0})
    writer.close()
    page = Checked(render([read_run(tmp_path / "bare")]))
    assert page.tags.count("svg") == 1 and "None were recorded." in page.texts and "Ranks" not in page.texts
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)


@pytest.mark.parametrize("junk", ["null", "[]", "{", "[" * 3000, '{"versions": []}', '{"commit": {"a": 1}}'])
def test_damaged_files_are_passed_over(run, junk):
    for name in ("events.jsonl", "ranks.jsonl", "outcome.json", "config.toml", "environment.json"):
        (run / name).write_text(junk)
    Checked(render([read_run(run)]))


def test_the_command(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    Checked((run / "report.html").read_text())
    assert main(["report", str(run / "nothing")]) == 2


def test_predicted_and_measured(tmp_path, capsys):
    from megatron_port.core.config.dump import to_toml
    from megatron_port.core.config.loader import load

    folder = make(tmp_path / "planned")
    (folder / "config.toml").write_text(to_toml(load(["models/gpt2-124m", "clusters/h200"]).config))
    assert main(["report", str(folder)]) == 0
    text = " ".join(Checked((folder / "report.html").read_text()).texts)
    assert "Predicted and measured" in text and "time of a step, median" in text and "of the step: compute" in text
    bare = make(tmp_path / "bare")
    assert main(["report", str(bare)]) == 0
    assert "bare is not compared with a plan" in capsys.readouterr().err
    assert "Predicted and measured" not in (bare / "report.html").read_text()


def test_series_stay_small_and_keep_extremes():
    series = Series()
    for step in range(100_000):
        series.add(step, 1000.0 if step == 77_777 else float(step % 10))
    series.add(100_000, float("nan"))
    assert len(series.buckets) <= POINTS and series.lost == 1 and sum(b.count for b in series.buckets) == 100_000
    assert max(b.most for b in series.buckets) == 1000.0 and series.mean == pytest.approx(4.5 + 0.00993, abs=1e-3)
    assert all(b.last - b.first < series.width for b in series.buckets)


@pytest.mark.parametrize("low, high", [(0, 1), (3, 3.0001), (-5, 1e9), (1e-9, 2e-9), (7, 7)])
def test_ticks(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 8 and all(low - 1e-9 <= t <= high + 1e-9 * abs(high) + 1e-9 for t in found)


@pytest.mark.parametrize("ys", [[1.0], [2.0, 2.0], [1e-6, 1.0, 1e5], [0.0, 0.0], [-3.0, 4.0]])
def test_charts_of_odd_data(ys):
    curve = Curve("a", [(float(i), y) for i, y in enumerate(ys)], band=[(0.0, min(ys), max(ys))] * 2)
    svg = line_chart([curve], label="x", marks=[Mark(0.0, "<b>")])
    Checked(svg)
    numbers = [float(n) for n in re.findall(r'(?:cy|y1|y2|y)="(-?[\d.]+)"', svg)]
    assert all(0 <= n <= 260 for n in numbers) and "nan" not in svg
