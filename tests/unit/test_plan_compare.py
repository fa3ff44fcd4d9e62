"""Planned beside measured, from a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_port.core.config.checks import resolve
from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.loader import load
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.tools.plan.compare import as_json, compare_run, render
from megatron_port.tools.plan.text import make_plan


def folder(path: Path, times: list[float], *, run: str = "runs/frontier-175b", **more: object) -> Path:
    config = resolve(load(run, ["cluster.nodes=16"] if "frontier" in run else []).config)
    path.mkdir()
    (path / "config.toml").write_text(to_toml(config))
    tokens = config.batch.global_batch_size * config.model.seq_length
    rows = [
        {"step": i + 1, "loss": 1.0, "seconds": s, "tokens_per_second": tokens / s, "memory_bytes": 40_000_000_000 + i,
         **more} for i, s in enumerate(times)
    ]
    lines = [json.dumps(r) for r in rows]
    lines.insert(2, json.dumps({"step": 1, "validation_loss": 2.0, "seconds": 1e6}))
    (path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 99, "loss": 1.0, "seco')
    return path


def test_time_and_memory_of_a_run(tmp_path: Path) -> None:
    plan = make_plan(load("runs/frontier-175b").config, neighbours=False)
    planned = plan.step.seconds
    found = compare_run(folder(tmp_path / "run", [9999.0, *(planned * x for x in (1.08, 1.1, 1.12, 1.1))]))
    assert found.steps == 4 and found.seconds == pytest.approx(1.1 * planned)  # the first step warms up
    assert found.time_error == pytest.approx(1 / 1.1 - 1)
    assert found.model_tflops == pytest.approx(plan.step.model_tflops / 1.1)
    assert found.bytes == 40_000_000_004 and found.predicted_bytes == plan.memory[0].allocated
    assert found.memory_error == pytest.approx(plan.memory[0].allocated / found.bytes - 1)
    text = render(found)
    assert "median of 4" in text and "-9.1%" in text and "memory" in text
    assert as_json(found)["measured_bytes"] == found.bytes


def test_steps_of_another_batch_are_left_out(tmp_path: Path) -> None:
    found = compare_run(folder(tmp_path / "run", [1.0, 1.0, 1.0], tokens_per_second=10.0))
    assert found.steps == 0 and found.seconds is None and found.time_error is None
    assert "no step was measured" in render(found) and "measured_seconds" not in as_json(found)


def test_what_is_no_run_or_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.toml"):
        compare_run(tmp_path)
    with pytest.raises(ConfigError, match=r"no \[hardware\]"):
        compare_run(folder(tmp_path / "cpu", [1.0], run="runs/quickstart"))
