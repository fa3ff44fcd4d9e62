"""After a run: what the planner said of it beside what was measured, from its folder alone.

The folder holds ``config.toml`` (resolved) and ``metrics.jsonl`` (docs/metrics.md).
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_port.core.config.layout import divisors
from megatron_port.core.config.loader import load
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import open_regular
from megatron_port.core.io.typed_json import Duration, Natural, WrongContent, parse_json, typed
from megatron_port.tools.plan.case import Case, Machine, balanced_split, case_of, machine_of
from megatron_port.tools.plan.memory import StageMemory, plan_memory, stage_memory
from megatron_port.tools.plan.search import legal_chunks
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


# The scaling studies of Dash et al. (arXiv 2312.12705): which layouts a study compares. Planned, or measured by
# ``bench sweep``; each point is a :class:`Case`, and what is compared is the rate of one device.

RATIO = 8
"""Micro-batches a stage of the study at a fixed ratio."""


@dataclass(frozen=True)
class Point:
    """One layout of a study."""

    x: float
    case: Case
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings beside the layout, by dotted name."""


@dataclass(frozen=True)
class Study:
    """Layouts that differ in one thing."""

    name: str
    title: str
    says: str
    """Observation of the paper."""
    x_label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Planned:
    """Plan of a point."""

    x: float
    tflops: float
    """Hardware TFLOP/s of one device, the paper's measure."""
    seconds: float
    efficiency: float
    """Rate over that of the study's first point."""
    fits: bool


def studies(case: Case, *, devices: int, tensor: tuple[int, ...]) -> list[Study]:
    """Every study of ``case``'s model on up to ``devices`` devices that has two points or more.

    ``tensor``: legal tensor-parallel sizes. Schedules are as in ``case``, without interleaving.
    """
    plain = replace(case, vp=1, schedule=case.schedule if legal_chunks(case.schedule, 1) else "1f1b", split=())
    found = [
        Study("tensor", "tensor parallelism", "III.1: larger tensor parallelism is slower", "tensor parallel size",
              tuple(_tensor(plain, devices, tensor))),
        Study("micro-batches", "micro-batches", "III.2: many micro-batches hide the bubble",
              "micro-batches per step and replica", tuple(_micro_batches(plain, devices))),
        Study("stages", "stages, batch fixed", "III.3: more stages at a fixed batch are slower", "pipeline stages",
              tuple(_stages(plain, devices, ratio=0))),
        Study("ratio", f"stages, {RATIO} micro-batches per stage",
              "III.4: the rate holds where stages and micro-batches grow alike", "pipeline stages",
              tuple(_stages(plain, devices, ratio=RATIO))),
        Study("weak", "weak scaling", "batch grows with the devices: 100 % published", "devices",
              tuple(_scaling(plain, devices, weak=True))),
        Study("strong", "strong scaling", "batch fixed: 89.93 % (175B) and 87.05 % (1T) published", "devices",
              tuple(_scaling(plain, devices, weak=False))),
        Study("attention", "length, attention fused", "FlashAttention-2 gives up to 30 %", "sequence length",
              tuple(_lengths(plain, devices, fused=True))),
        Study("attention-math", "length, scores written out", "what FlashAttention-2 is compared with",
              "sequence length", tuple(_lengths(plain, devices, fused=False))),
    ]
    return [s for s in found if len(s.points) > 1]


def _made(case: Case, *, tp: int, pp: int, dp: int, count: int) -> Case:
    """Return ``case`` with this split and ``count`` micro-batches per replica."""
    sequence = case.sequence_parallel and tp > 1 and case.model.seq_length % tp == 0
    return replace(
        case, tp=tp, pp=pp, dp=dp, micro_batches=count, global_batch=count * dp * case.micro_batch,
        split=balanced_split(case.model, pp), sequence_parallel=sequence,
    )


def _tensor(case: Case, devices: int, sizes: tuple[int, ...]) -> Iterator[Point]:
    """Tensor instead of data parallel size on the same devices; stages and micro-batches (the bubble) kept."""
    pp = case.pp if devices % case.pp == 0 else 1
    for tp in sizes:
        dp, rest = divmod(devices, tp * pp)
        if not rest and dp:
            yield Point(tp, _made(case, tp=tp, pp=pp, dp=dp, count=case.micro_batches))


def _pipeline(case: Case, devices: int) -> tuple[int, int]:
    """tp and pp of a study that needs a pipeline on up to ``devices``: the case's, or as many stages as can be."""
    if case.pp > 1 and case.tp * case.pp <= devices:
        return case.tp, case.pp
    pp = max((p for p in divisors(case.model.num_layers) if p <= devices), default=1)
    return 1, pp


def _micro_batches(case: Case, devices: int) -> Iterator[Point]:
    tp, pp = _pipeline(case, devices)
    if pp > 1:
        dp = max(1, min(case.dp, devices // (tp * pp)))
        for factor in (0.5, 1, 2, 4, 8, 16):
            count = int(pp * factor)
            if count:
                yield Point(count, _made(case, tp=tp, pp=pp, dp=dp, count=count))


def _stages(case: Case, devices: int, *, ratio: int) -> Iterator[Point]:
    """One replica of more and more stages. ``ratio``: micro-batches per stage; 0: as many as the most stages get."""
    tp, _ = _pipeline(case, devices)
    layers = case.model.num_layers
    sizes = [p for p in divisors(layers) if p > 1 and p * tp <= devices]
    deep = [p for p in sizes if p >= 4 and layers // p >= 3]  # fewer layers a stage: the head's imbalance would show
    sizes = deep if len(deep) > 1 else sizes
    most = max(sizes, default=0)
    for pp in sizes:
        yield Point(pp, _made(case, tp=tp, pp=pp, dp=1, count=ratio * pp if ratio else 2 * most))


def _scaling(case: Case, devices: int, *, weak: bool) -> Iterator[Point]:
    """More and more replicas of the case's slice."""
    own = case.tp * case.pp
    tp, pp = (case.tp, case.pp) if own <= devices else (1, 1)
    most = devices // (tp * pp)
    batch = case.global_batch // case.micro_batch
    each = max(1, batch // case.dp)
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    for dp in sizes if sizes[-1] == most else [*sizes, most]:
        if weak:
            yield Point(tp * pp * dp, _made(case, tp=tp, pp=pp, dp=dp, count=each))
        elif batch % dp == 0:
            yield Point(tp * pp * dp, _made(case, tp=tp, pp=pp, dp=dp, count=batch // dp))


def _lengths(case: Case, devices: int, *, fused: bool) -> Iterator[Point]:
    """Longer and longer samples with the tokens of a step kept, on as many replicas as the case has."""
    tp, pp = (case.tp, case.pp) if case.tp * case.pp <= devices else (1, 1)
    dp = max(1, min(case.dp, devices // (tp * pp)))
    length = case.model.seq_length
    for longer, shorter in ((1, 2), (1, 1), (2, 1), (4, 1)):
        count, rest = divmod(case.micro_batches * shorter, longer)
        seq = length * longer // shorter
        if rest or length % shorter or seq % tp:
            continue
        made = _made(replace(case, model=replace(case.model, seq_length=seq)), tp=tp, pp=pp, dp=dp, count=count)
        made = replace(made, flash=case.flash and fused)
        yield Point(seq, made, (("model.seq_length", seq), *(() if fused else (("backend.attention", "math"),))))


def planned(study: Study, machine: Machine) -> list[Planned]:
    """Plan every point."""
    out: list[Planned] = []
    limit = machine.cluster.memory_gb * 1e9
    for point in study.points:
        step = plan_step(point.case, machine)
        fits = max(m.total for m in plan_memory(point.case, machine)) <= limit
        first = out[0].tflops if out else step.hardware_tflops
        out.append(Planned(point.x, step.hardware_tflops, step.seconds, step.hardware_tflops / first, fits))
    return out
