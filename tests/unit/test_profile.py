"""Traces of chosen steps: what is traced, what is not, and one timeline of several ranks."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_port.core.config.checks import problems
from megatron_port.core.config.ranges import are_ranges, parse_ranges, within
from megatron_port.core.config.schema import RunConfig, TelemetryConfig, TrainingConfig
from megatron_port.core.dist.process import BACKWARD, FORWARD, ProgressTracker
from megatron_port.core.io.logging import Logger
from megatron_port.ext.health.profile import StepProfiler
from megatron_port.ext.health.trace import FOLDER, MERGED, SPAN, main, merge, rank_events, trace_name


def session(tmp_path: Path, rank: int = 0, **telemetry: Any) -> Any:
    config = RunConfig(
        name="mine", output_dir=str(tmp_path), training=TrainingConfig(steps=9), telemetry=TelemetryConfig(**telemetry)
    )
    return SimpleNamespace(
        config=config, info=SimpleNamespace(rank=rank, hostname="here"), device=SimpleNamespace(is_gpu=False),
        ctx=SimpleNamespace(coords=f"pp 0, dp {rank}, tp 0"), progress=ProgressTracker(), logger=Logger(rank),
        is_rank_zero=rank == 0,
    )


def train(found: Any, first: int = 0, last: int = 6) -> None:
    """Steps as the loop takes them, around a matrix product in each of two phases."""
    profiler = StepProfiler(found, first)
    a, progress = torch.ones(64, 64), found.progress
    for step in range(first + 1, last + 1):
        with profiler.step(step):
            progress.begin_step(step - 1)
            progress.at(FORWARD, "micro-batch", 0)
            torch.mm(a, a)
            time.sleep(0.02)
            progress.at(BACKWARD, "micro-batch", 0)
            torch.mm(a, a)
            time.sleep(0.02)
            progress.end_step()
    profiler.close()


def test_sets_of_numbers() -> None:
    assert parse_ranges("20, 10-12") == ((10, 12), (20, 20))
    assert within(11, parse_ranges("10-12")) and not within(13, parse_ranges("10-12"))
    for wrong in ("12-10", "a", "1-", "1,,2", "-1", " "):
        assert not are_ranges(wrong)
    run = RunConfig()
    for profile, ranks, bad in (("next", "all", 0), ("3-4,9", "0,8-15", 0), ("soon", "0", 1), ("3", "some", 1)):
        found = problems(replace(run, telemetry=replace(run.telemetry, profile=profile, profile_ranks=ranks)))
        assert len([x for x in found if "telemetry.profile" in x]) == bad


def test_the_chosen_steps_are_traced_and_only_those(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = session(tmp_path, profile="3-4,6")
    train(found)
    assert "at" not in vars(found.progress)  # the tracker is as it was
    folders = sorted(p.name for p in (tmp_path / "mine" / FOLDER).iterdir())
    assert folders == ["steps-3-4", "steps-6-6"]
    folder = tmp_path / "mine" / FOLDER / "steps-3-4"
    assert sorted(p.name for p in folder.iterdir()) == [MERGED, "operators-rank-00000.txt", trace_name(0)]
    assert "aten::mm" in (folder / "operators-rank-00000.txt").read_text()
    assert str(folder / MERGED) in capsys.readouterr().out
    events = json.loads(gzip.decompress((folder / MERGED).read_bytes()))["traceEvents"]
    steps = {e["name"]: e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("step ")}
    phases = [e for e in events if e.get("cat") == "phase"]
    products = [e for e in events if e.get("name") == "aten::mm"]
    assert set(steps) == {"step 3", "step 4"} and len(products) == 4
    names = [p["name"] for p in phases]
    assert names == ["forward, micro-batch 0", "backward, micro-batch 0"] * 2

    def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
        slack = 5000.0  # of two clocks, in microseconds; a phase takes 20,000
        return (outer["ts"] - slack <= inner["ts"]
                and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack)

    for i, product in enumerate(products):  # the phases are where the work is
        assert inside(product, phases[i]) and inside(phases[i], steps[f"step {3 + i // 2}"])


def test_next_is_counted_from_this_start(tmp_path: Path) -> None:
    train(session(tmp_path, profile="next"), first=4, last=9)
    assert [p.name for p in (tmp_path / "mine" / FOLDER).iterdir()] == ["steps-7-9"]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    found = session(tmp_path, rank=1, profile="2-3")
    train(found)
    assert not (tmp_path / "mine").exists()
    train(session(tmp_path, rank=1, profile="2-3", profile_ranks="1-3"))
    folder = tmp_path / "mine" / FOLDER / "steps-2-3"
    assert [p.name for p in folder.glob("*.gz")] == [trace_name(1)]  # rank 0 merges


def trace(rank: int, base: int, ts: float) -> dict[str, Any]:
    return {
        "baseTimeNanoseconds": base, "rank": {
            "rank": rank, "host": f"h{rank}", "coords": f"tp {rank}",
            "phases": [{"name": "forward", "since": base + int(ts * 1000), "until": base + int(ts * 1000) + 5000}]},
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "ts": ts, "args": {"name": "python"}},
            {"ph": "X", "name": "mm", "pid": 7, "tid": 7, "ts": ts, "dur": 5.0},
            {"ph": "s", "name": "flow", "id": 1, "pid": 7, "tid": 7, "ts": ts},
            {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": ts + 1, "dur": 1.0}],
    }


def test_ranks_share_one_clock_and_nothing_else(tmp_path: Path) -> None:
    # The same instant, 1 ms after the first base, in traces that count from different times.
    for rank, base, ts in ((0, 10**18, 1000.0), (1, 10**18 + 400_000, 600.0)):
        (tmp_path / trace_name(rank)).write_bytes(gzip.compress(json.dumps(trace(rank, base, ts)).encode()))
    body = json.loads(gzip.decompress(merge(tmp_path).read_bytes()))
    assert body["baseTimeNanoseconds"] == 10**18
    events = body["traceEvents"]
    assert [e["ts"] for e in events if e["name"] == "mm"] == [1000.0, 1000.0]
    assert [e["ts"] for e in events if e["name"] == "forward"] == [1000.0, 1000.0]
    pids = {rank: {e["pid"] for e in events if e["pid"] // SPAN == rank} for rank in (0, 1)}
    assert pids == {0: {0, 1, 2}, 1: {SPAN, SPAN + 1, SPAN + 2}}
    assert sorted(e["id"] for e in events if e["name"] == "flow") == ["0.1", "1.1"]
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named == ["rank 0 (tp 0) on h0: phases", "rank 0 (tp 0) on h0: python", "rank 1 (tp 1) on h1: phases",
                     "rank 1 (tp 1) on h1: python"]
    assert list(rank_events(trace(0, 5, 1.0), 5))


def test_a_folder_without_traces_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["trace", str(tmp_path)])
    assert main() == 1 and "no rank-NNNNN.json.gz there" in capsys.readouterr().err
    (tmp_path / trace_name(0)).write_bytes(gzip.compress(b"[]"))
    assert main() == 1 and "not a trace" in capsys.readouterr().err
