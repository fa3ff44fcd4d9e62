"""After a run: what the planner said of it beside what was measured, from its folder alone.

The folder holds ``config.toml`` (resolved) and ``metrics.jsonl`` (docs/metrics.md).
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.config.loader import load
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import open_regular
from megatron_port.core.io.typed_json import Duration, Natural, WrongContent, parse_json, typed
from megatron_port.tools.plan.case import Case, case_of, machine_of
from megatron_port.tools.plan.memory import StageMemory, stage_memory
from megatron_port.tools.plan.step import StepPlan, plan_step


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predicted and measured, of one run. Times are seconds of a step, memory is bytes of rank 0."""

    name: str
    case: Case
    plan: StepPlan
    memory: StageMemory
    """Memory of the first stage, where rank 0 is."""
    steps: int
    """Steps that were measured."""
    seconds: float | None
    """Median of their times; None: no step was measured."""
    low: float | None
    """First quartile."""
    high: float | None
    """Third quartile."""
    model_tflops: float | None
    """Measured, of one device, at the median."""
    bytes: int | None
    """Measured: the allocator's peak on a GPU, the resident size of the process on a CPU; None: not recorded."""
    predicted_bytes: float
    """Planned bytes: allocated on a GPU; allocated and reserved on a CPU."""

    @property
    def time_error(self) -> float | None:
        """Planned ÷ measured time − 1."""
        return None if self.seconds is None else self.plan.seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Planned ÷ measured memory − 1."""
        return None if not self.bytes else self.predicted_bytes / self.bytes - 1


def compare_run(folder: Path, *, warm_up: int = 1) -> Comparison:
    """Plan the run of ``folder`` again and read what it measured, its first ``warm_up`` steps left out.

    Steps of another batch size (a ramp-up) are left out too.

    Raises:
        ConfigError: the run's cluster says too little to plan.
        DataError: the folder holds no run.
    """
    path, metrics = folder / "config.toml", folder / "metrics.jsonl"
    for wanted in (path, metrics):
        if not wanted.is_file():
            raise DataError(f"{folder} is no folder of a run: it has no {wanted.name}")
    config = load(str(path)).config
    machine = machine_of(config)
    case, _ = case_of(config)
    step, memory = plan_step(case, machine), stage_memory(case, machine, 0)
    tokens = config.batch.global_batch_size * config.model.seq_length
    seconds, largest, first = [], None, None
    for row in _records(metrics):
        if row.memory_bytes is not None:
            largest = max(largest or 0, row.memory_bytes)
        if row.loss is None or row.seconds is None:
            continue
        first = row.step if first is None else first
        rate = row.tokens_per_second
        whole = not isinstance(rate, (int, float)) or math.isclose(rate * row.seconds, tokens, rel_tol=1e-3)
        if row.step >= first + warm_up and whole:
            seconds.append(row.seconds)
    median = statistics.median(seconds) if seconds else None
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median, median, median]
    on_cpu = config.backend.device == "cpu"
    return Comparison(
        name=config.name, case=case, plan=step, memory=memory, steps=len(seconds), seconds=median, low=quartiles[0],
        high=quartiles[2], model_tflops=None if not median else step.model_tflops * step.seconds / median,
        bytes=largest, predicted_bytes=memory.allocated + (memory.reserved if on_cpu else 0.0),
    )


def _records(path: Path) -> Iterator[MeasuredStep]:
    """Whole lines of a metrics.jsonl; torn ones are passed over. (This package may not import ``telemetry``.)"""
    with open(open_regular(path, follow=True), "rb") as stream:
        for line in stream:
            with contextlib.suppress(WrongContent):
                yield typed(MeasuredStep, parse_json(line))


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Fields that a comparison reads from a line of metrics.jsonl."""

    step: Natural
    loss: Any = None
    seconds: Duration | None = None
    tokens_per_second: Any = None
    memory_bytes: Natural | None = None


def render(found: Comparison) -> str:
    """The comparison in a few lines."""
    lines = [f"{found.name}: {found.case.label()}"]
    if found.seconds is None:
        lines.append(f"time      planned {found.plan.seconds:.4g} s per step; no step was measured")
    else:
        lines.append(
            f"time      planned {found.plan.seconds:.4g} s per step, measured {found.seconds:.4g} (median of "
            f"{found.steps}, quartiles {found.low:.4g} to {found.high:.4g}): {found.time_error:+.1%}"
        )
        lines.append(
            f"rate      planned {found.plan.model_tflops:.4g} model TFLOP/s per device, "
            f"measured {found.model_tflops:.4g}"
        )
    if found.bytes:
        lines.append(
            f"memory    planned {found.predicted_bytes / 1e9:.3g} GB on rank 0, measured {found.bytes / 1e9:.3g}: "
            f"{found.memory_error:+.1%}"
        )
    parts = "  ".join(f"{n} {s / found.plan.seconds:.1%}" for n, s in found.plan.split.parts().items())
    return "\n".join([*lines, f"planned   {parts}"])


def as_json(found: Comparison) -> dict[str, Any]:
    """Plain values; what is not known is absent."""
    values: dict[str, Any] = {
        "name": found.name, "layout": found.case.label(), "steps": found.steps,
        "planned_seconds": found.plan.seconds, "measured_seconds": found.seconds, "low": found.low, "high": found.high,
        "time_error": found.time_error, "planned_bytes": found.predicted_bytes, "measured_bytes": found.bytes,
        "memory_error": found.memory_error, "planned_tflops": found.plan.model_tflops,
        "measured_tflops": found.model_tflops, "planned_split": found.plan.split.parts(),
    }
    return {k: v for k, v in values.items() if v is not None}


__all__ = ["Comparison", "as_json", "compare_run", "render"]
