"""What is seen of experts: numbers by definition, counts that add up over attempts, starving experts by name."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_port.core.config.model import MoEConfig, RoutesConfig
from megatron_port.core.config.schema import ModelConfig, RunConfig, TrainingConfig
from megatron_port.core.dist.rank import LeaseLost
from megatron_port.ext.telemetry.expert_file import (
    ROWS,
    ExpertFile,
    LayerCounts,
    StarvingExperts,
    is_row_due,
    read_rows,
)
from megatron_port.ext.telemetry.metrics import read_metrics
from megatron_port.ext.telemetry.sinks import Telemetry
from megatron_port.tools.report.run_data import read_run
from megatron_port.tools.report.run_report import COLUMNS, FILLS, ExpertHistory, layer_map, render

K, LAYERS, EXPERTS = 2, 3, 4
MODEL = ModelConfig(seq_length=20, moe=MoEConfig(
    num_experts=EXPERTS, top_k=K, capacity_factor=1.0, balance_loss="sequence", z_weight=0.1,
))


def tallies(step: int, *, starved: bool = False) -> dict[str, Any]:
    """Three layers of which the first is dense; each token of 100 is sent to two of four experts."""
    rng = np.random.default_rng(step)
    tokens = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
    for layer in (1, 2):
        tokens[layer] = rng.multinomial(200, [0.4, 0.3, 0.2, 0.1])
    if starved:
        tokens[2] = [120, 70, 8, 2]
    return {"expert_tokens": tokens, "dropped": np.array([0, step, 2]), "margin": np.array([0.0, 7.0, 9.0]),
            "balance_loss": np.array([0.0, 5.0, 15.0]), "z_loss": np.array([0.0, 50.0, 25.0])}


def counts(step: int, *, starved: bool = False) -> LayerCounts:
    found = LayerCounts.of(tallies(step, starved=starved), MODEL)
    assert found is not None
    return found


def test_numbers_by_their_definitions() -> None:
    assert LayerCounts.of({}, MODEL) is None
    made = counts(5, starved=True)
    assert made.layers == (1, 2)  # layer 0 is dense
    mean = 200 / EXPERTS
    assert made.summary() == {
        "expert_load_max": 120 / mean, "expert_load_min": 2 / mean, "experts_low": 1, "dropped_share": (5 + 2) / 400,
        "router_margin": pytest.approx((7 / 100 + 9 / 100) / 2), "balance_loss": 2.0, "z_loss": 0.375,
    }
    plain = LayerCounts.of(tallies(5), ModelConfig(moe=MoEConfig(num_experts=EXPERTS, top_k=K)))
    assert plain is not None and not {"dropped_share", "balance_loss", "z_loss"} & set(plain.summary())


def test_counts_of_a_run_killed_and_resumed(tmp_path: Path) -> None:
    """Resumed at any row's step, the file is that of an uninterrupted run; in between the rows add up to its steps."""
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"

    def go(path: Path, first: int, last: int, resumed: int) -> ExpertFile:
        file = ExpertFile(path, 5, resumed)
        for step in range(first, last + 1):
            file.step(step, counts(step))
        return file

    go(whole, 1, 43, 0).close()
    go(broken, 1, 33, 0)  # killed: 31 to 33 were never written
    broken.write_bytes(broken.read_bytes() + b'{"step": 3')
    go(broken, 21, 43, 20).close()
    assert broken.read_bytes() == whole.read_bytes()
    rows = list(read_rows(whole))
    assert [(step, steps) for step, steps, _ in rows] == [(n, 5) for n in range(5, 41, 5)] + [(43, 3)]
    total = rows[0][2]
    for _, _, more in rows[1:]:
        total = total.plus(more)
    want = np.sum([tallies(s)["expert_tokens"][1:] for s in range(1, 44)], axis=0)
    assert (total.tokens == want).all() and total.sums["dropped"].tolist() == [43 * 44 / 2, 2 * 43]
    assert np.allclose(total.sums["margin"], [7 * 43, 9 * 43])
    with pytest.raises(LeaseLost):
        ExpertFile(whole, 5, 20, lambda: (_ for _ in ()).throw(LeaseLost("taken")))
    assert len(list(read_rows(whole))) == 9  # nothing was removed


def test_rows_become_rarer_and_hostile_ones_are_passed_over(tmp_path: Path) -> None:
    due = [step for step in range(1, 64 * ROWS + 1) if is_row_due(step, 2)]
    assert len(due) == ROWS + 5 * ROWS // 2 and due[: ROWS + 2] == [*range(2, 2 * ROWS + 1, 2), 2004, 2008]
    path = tmp_path / "experts.jsonl"
    file = ExpertFile(path, 1)
    file.step(1, counts(1))
    file.close()
    good = json.loads(path.read_text())
    bad = [{**good, "tokens": [[1, 2], [3]]}, {**good, "tokens": [[0] * 4] * 2}, {**good, "layers": [1]},
           {**good, "step": 1.5}, {**good, "tokens": [[-1, 5, 5, 5]] * 2}, {**good, "z_loss": [float("nan"), 1]},
           {**good, "tokens": [[1] * 5] * 2}, {**good, "steps": 0}, [], {"step": 3}]
    path.write_text("\n".join(map(json.dumps, [good, *bad, {**good, "step": 2}])) + "\n{\"step")
    lost: list[int] = []
    assert [step for step, _, _ in read_rows(path, lambda: lost.append(1))] == [1, 2]
    assert len(lost) == len(bad) + 1


def test_starving_experts_are_named_once_and_with_numbers() -> None:
    watch = StarvingExperts(RoutesConfig(starved_share=0.2, starved_steps=3))
    said = [watch.step(step, counts(step, starved=4 <= step <= 9 or step >= 11)) for step in range(1, 16)]
    assert [i + 1 for i, line in enumerate(said) if line] == [6, 13]  # the third step in a row, and after a recovery
    assert "step 6: 2 of 8 experts starve: below 20 % of their layer's mean load for 3 steps in a row" in said[5]
    assert "layer 2: experts 2 (16 %), 3 (4 %). An expert without" in said[5]
    assert said[12].endswith("layer 2: experts 2 (16 %), 3 (4 %)")  # the advice was given
    off = StarvingExperts(RoutesConfig(starved_steps=0))
    assert not any(off.step(step, counts(step, starved=True)) for step in range(1, 5))


def test_a_run_shows_its_experts(tmp_path: Path) -> None:
    """Records, console, warning and report of one run, from the tallies that the engine returns."""
    out = io.StringIO()
    warnings: list[str] = []
    config = RunConfig(
        model=MODEL, moe=RoutesConfig(starved_steps=4),
        training=TrainingConfig(steps=20, log_interval=2),
    )
    telemetry = Telemetry(tmp_path, config, is_rank_zero=True, stream=out, warn=warnings.append)
    for step in range(1, 21):
        telemetry.step({"step": step, "loss": 2.0}, tallies(step, starved=step > 10))
    telemetry.evaluation(step=20, validation_loss=2.0)
    telemetry.close()
    last = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r][-1]
    assert last["expert_load_max"] == 2.4 and last["experts_low"] == 1
    assert "| expert load 0.04 to 2.40, 5.5 % dropped" in out.getvalue()
    assert len(warnings) == 1 and warnings[0].startswith("step 14: 1 of 8 experts starve")
    html = render([read_run(tmp_path)])
    assert "layer 1</h3>" in html and "layer 2</h3>" in html and "layer 0" not in html
    assert re.search(r'layer 2</td><td class="n">0</td><td class="n">2.4</td><td class="n">3</td>', html)


def test_a_map_has_each_window_of_each_expert_once() -> None:
    history = ExpertHistory()
    for row in range(1, 3 * COLUMNS + 1):
        history.add(5 * row, 5, counts(row, starved=row > 2 * COLUMNS))
    assert len(history.windows) <= COLUMNS and [first for first, _, _ in history.windows[1:]] == [
        last + 1 for _, last, _ in history.windows[:-1]]
    assert sum(int(c.tokens.sum()) for _, _, c in history.windows) == 3 * COLUMNS * 400
    found = np.full((EXPERTS, len(history.windows)), -1)
    for fill, path in re.findall(r'<path style="fill:([^"]+)" d="([^"]+)"', layer_map(history, 1)):
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path):
            cells = found[int(y), int(x):int(x) + int(width)]
            assert (cells == -1).all()
            cells[:] = FILLS.index(fill)
    assert (found[3, -10:] == 0).all() and (found[0, -10:] == FILLS.index("color-mix(in srgb, var(--c1) 70%, "
                                                                          "var(--paper))")).all()
    assert (found >= 0).all() and (found[3, :10] > 0).all()
