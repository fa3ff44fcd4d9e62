"""metrics.jsonl: every step once, nothing invented, nothing half-read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.cli.main import main
from megatron_port.ext.telemetry.metrics import MetricsWriter, decode, encode, read_metrics
from megatron_port.ext.telemetry.step_metrics import OWN, step_metrics

ROOT = Path(__file__).parents[2]
GARBAGE = [b"", b"\n", b"\xff\x00{", b"{}\n", b"null\n"]


def test_docs_define_every_field() -> None:
    """The page's table is made of the declarations."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (int|float|bool) \| (.*) \|$", text, re.M)
    assert found == [(metric.name, metric.type.__name__, metric.help) for metric in OWN] and len(found) > 30


def test_lines(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run" / "metrics.jsonl")
    writer.write({"loss": 2, "step": 1, "grad_norm": None, "skipped": True})
    # Flushed: whole on disk while the writer is still open.
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0, "skipped": true}\n'
    writer.close()
    writer.close()


def test_values_that_are_not_finite_are_strict_json() -> None:
    line = encode({"step": 1, "loss": math.nan, "grad_norm": math.inf, "validation_loss": -math.inf})
    raw = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert raw["loss"] == "NaN"
    back = decode(line, step_metrics())
    assert back is not None and math.isnan(back["loss"])
    assert (back["grad_norm"], back["validation_loss"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    "record",
    [{"loss": 1.0}, {"step": 1, "los": 1.0}, {"step": 1.0}, {"step": 1, "skipped": 1}, {"step": 1, "loss": True},
     {"step": 1, "loss": "1"}, {"step": 1, "tokens": 1.5}],
)
def test_bad_records(record: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        encode(record)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(kept=st.integers(0, 9), cut=st.integers(0, 60), garbage=st.sampled_from(GARBAGE))
def test_resume_records_each_step_once(
    tmp_path_factory: pytest.TempPathFactory, kept: int, cut: int, garbage: bytes
) -> None:
    """Killed anywhere, resumed from any earlier step: the file is that of an uninterrupted run."""
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"

    def go(first: int, resumed: int) -> None:
        writer = MetricsWriter(path, resumed)
        for step in range(first, 11):
            writer.write({"step": step, "loss": float(step)})
            if step % 3 == 0:
                writer.write({"step": step, "validation_loss": float(step)})
        writer.close()

    go(1, 0)
    want = path.read_text()
    data = path.read_bytes()
    # What was written up to a checkpoint is on disk; the tail may be torn.
    safe = data.index(b'{"step": %d' % (kept + 1))
    path.write_bytes(data[: max(safe, len(data) - cut)] + garbage)
    go(kept + 1, kept)
    assert path.read_text() == want
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_line_that_the_disk_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    stream = writer._stream

    class Full:
        closed = False

        def write(self, data: bytes) -> int:
            return stream.write(data[:7])

    writer._stream = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="7 of"):
        writer.write({"step": 1, "loss": 1.0})
    writer._stream = stream
    writer.write({"step": 2, "loss": 2.0})
    writer.close()
    assert list(read_metrics(path)) == [{"step": 2, "loss": 2.0}]


def test_a_step_without_a_loss_is_a_step(tmp_path: Path) -> None:
    """Every label of it was masked; the evaluation after it is another line, and a resume keeps both."""
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [{"step": 1, "loss": None, "grad_norm": 0.0}, {"step": 1, "validation_loss": 2.0}]
    for resumed in (0, 1):
        writer = MetricsWriter(path, resumed)
        for line in lines if resumed == 0 else ():
            writer.write(line)
        writer.close()
    assert list(read_metrics(path)) == [{"step": 1, "grad_norm": 0.0}, {"step": 1, "validation_loss": 2.0}]


GOOD = '{"step": 3, "loss": 2.5, "seconds": 1.0, "time": 1.7e9}'
HOSTILE = {
    "step of 400 digits": '{"step": 1%s, "loss": 2.0}' % ("0" * 400),
    "step of 5000 digits": '{"step": 1%s}' % ("0" * 5000),
    "step negative": '{"step": -1}', "step true": '{"step": true, "loss": 1.0}', "step a fraction": '{"step": 1.5}',
    "step above 63 bits": '{"step": 9223372036854775808, "loss": 1.0}',
    "loss of 400 digits": '{"step": 1, "loss": 1%s}' % ("0" * 400),
    "loss near the largest": '{"step": 1, "loss": 1e308}', "loss a list": '{"step": 1, "loss": [1]}',
    "loss a word": '{"step": 1, "loss": "inf"}', "loss null": '{"step": 1, "loss": null}',
    "time infinite": '{"step": 1, "time": 1e999}', "time NaN": '{"step": 1, "time": NaN}',
    "time of the future": '{"step": 1, "time": 1e18}', "seconds negative": '{"step": 1, "seconds": -5.0}',
    "seconds infinite": '{"step": 1, "seconds": "Infinity"}', "tokens text": '{"step": 1, "tokens": "9"}',
    "skipped a number": '{"step": 1, "skipped": 2}', "nested": "[" * 100_000,
    "long": '{"step": 1, "x": "%s"}' % ("x" * (1 << 20)),
    "torn": '{"step": 1, "lo', "not UTF-8": '\udcff\udcfe', "no step": '{"loss": 1.0}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_lines_are_no_records(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are passed over and counted, also by `report`, which says how many; those around them are read."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{GOOD}\n{line}\n\n{line}\n{GOOD}\n", errors="surrogateescape")
    bad: list[int] = []
    rows = list(read_metrics(path, bad.append))
    assert [row["step"] for row in rows] == [3, 3] and bad == [2, 4]
    for name in ("events.jsonl", "ranks.jsonl"):
        (tmp_path / name).write_text(f'{line}\n{{"event": "start", "time": {"9" * 300}}}\n', errors="surrogateescape")
    assert main(["report", str(tmp_path)]) == 0
    told = f"{tmp_path.name}: left out, torn or not what a run writes: "
    err, page = capsys.readouterr().err, (tmp_path / "report.html").read_text()
    assert told in err and "2 lines of metrics.jsonl" in err and "lines of ranks.jsonl" in err
    assert told in page and "2 lines of metrics.jsonl" in page


def test_numbers_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": "NaN", "grad_norm": "Infinity"}\n')
    row = next(read_metrics(path))
    assert math.isnan(row["loss"]) and row["grad_norm"] == math.inf
