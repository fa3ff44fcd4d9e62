"""Counts of experts.jsonl: tokens of each expert of each layer, summed over the steps between two rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron_port.core.config.model import ModelConfig, RoutesConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.rank import LeaseLost
from megatron_port.core.io.files import atomic_file, open_regular
from megatron_port.core.io.typed_json import parse_json
from megatron_port.ext.telemetry.metrics import Record

# Load of experts, step by step: its numbers for metrics.jsonl, and which experts starve.
#
# docs/metrics.md defines each number. Counts are exact, of all ranks, and count a token once for each of its experts,
# before any is dropped. Layers without experts have rows of zeros, and none here.

LOW = 0.1
"""Share of the mean load below which ``experts_low`` counts an expert."""
MEANS = {"margin": "router_margin", "balance_loss": "balance_loss", "z_loss": "z_loss"}
"""Tally → field of metrics.jsonl: its mean over tokens."""
ADVICE = (
    ". An expert without tokens learns nothing: set model.moe.balance_bias = true or a model.moe.balance_loss, raise "
    "model.moe.balance_weight or model.moe.bias_rate, or lower optimizer.lr (docs/moe.md)"
)
"""End of the first warning."""
Counts = NDArray[np.int64]
Sums = NDArray[np.float64]


@dataclass
class LayerCounts:
    """Sums over some steps, of the layers that have experts."""

    layers: tuple[int, ...]
    """Numbers of the layers."""
    tokens: Counts
    """[layers, experts]: choices of each expert."""
    sums: Mapping[str, Sums]
    """[layers] each: ``dropped`` choices, and what has a mean, summed over tokens, as far as the model has it."""
    top_k: int

    @classmethod
    def of(cls, tallies: Mapping[str, Any], model: ModelConfig) -> LayerCounts | None:
        """Return a step's counts from :attr:`StepResult.tallies` (``experts.router``); None: no layer has experts."""
        if "expert_tokens" not in tallies:
            return None
        every, moe = np.asarray(tallies["expert_tokens"], dtype=np.int64), model.moe
        layers = np.flatnonzero(every.sum(axis=1))
        known = {"dropped": moe.drops, "margin": True, "balance_loss": moe.balance_loss != "none",
                 "z_loss": moe.z_weight > 0}
        sums = {name: np.asarray(tallies[name], dtype=np.float64)[layers] for name, there in known.items() if there}
        if "balance_loss" in sums:
            sums["balance_loss"] *= model.seq_length  # it is a sum over samples
        return cls(tuple(layers.tolist()), every[layers], sums, moe.top_k) if len(layers) else None

    def plus(self, other: LayerCounts) -> LayerCounts:
        """Return the sums over both. ValueError: they are of different layers."""
        if self.layers != other.layers:
            raise ValueError(f"counts of layers {self.layers} and {other.layers} cannot be added")
        sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        return LayerCounts(self.layers, self.tokens + other.tokens, sums, self.top_k)

    @property
    def load(self) -> Sums:
        """[layers, experts]: tokens of each expert over the mean of its layer."""
        load: Sums = self.tokens / self.tokens.mean(axis=1, keepdims=True)
        return load

    @property
    def routed(self) -> Counts:
        """[layers]: tokens."""
        routed: Counts = self.tokens.sum(axis=1) // self.top_k
        return routed

    def mean(self, name: str) -> Sums:
        """[layers]: the mean over tokens of a sum."""
        mean: Sums = self.sums[name] / self.routed
        return mean

    def summary(self) -> dict[str, float | int]:
        """Return the fields of metrics.jsonl."""
        load = self.load
        out: dict[str, float | int] = {
            "expert_load_max": float(load.max()), "expert_load_min": float(load.min()),
            "experts_low": int((load < LOW).sum()),
        }
        if "dropped" in self.sums:
            out["dropped_share"] = float(self.sums["dropped"].sum() / self.tokens.sum())
        return out | {field: float(self.mean(name).mean()) for name, field in MEANS.items() if name in self.sums}


class StarvingExperts:
    """Finds experts whose load stays below ``moe.starved_share`` of their layer's mean for ``moe.starved_steps``."""

    def __init__(self, config: RoutesConfig) -> None:
        self._share, self._steps = config.starved_share, config.starved_steps
        self._row: Counts | None = None
        self._advised = False

    def step(self, step: int, counts: LayerCounts) -> str:
        """Return a warning that names the experts that have been starving for so long by now; empty: no new ones."""
        if not self._steps:
            return ""
        load = counts.load
        row = np.zeros_like(counts.tokens) if self._row is None else self._row
        self._row = np.where(load < self._share, row + 1, 0)
        if not (self._row == self._steps).any():
            return ""
        advice, self._advised = "" if self._advised else ADVICE, True
        return starving_line(step, counts, self._row == self._steps, self._share, self._steps) + advice


def starving_line(step: int, counts: LayerCounts, found: NDArray[np.bool_], share: float, steps: int) -> str:
    """Return the warning about the experts marked in ``found`` [layers, experts]: of eight layers, four each."""
    parts = []
    for i in np.flatnonzero(found.any(axis=1))[:8]:
        experts = np.flatnonzero(found[i])
        some = ", ".join(f"{e} ({100 * counts.load[i, e]:.3g} %)" for e in experts[:4])
        more = f" and {len(experts) - 4} more" if len(experts) > 4 else ""
        parts.append(f"layer {counts.layers[i]}: expert{'s' if len(experts) > 1 else ''} {some}{more}")
    left = int(found.any(axis=1).sum()) - len(parts)
    return (
        f"step {step}: {int(found.sum())} of {found.size} experts starve: below {100 * share:g} % of their layer's "
        f"mean load for {steps} steps in a row (moe.starved_share, moe.starved_steps). {'; '.join(parts)}"
        f"{f'; {left} layers more' if left else ''}"
    )


FILE_NAME = "experts.jsonl"
ROWS = 1000
"""Rows of the file after which they come half as often, and so again at each doubling of the steps."""
LINE_BYTES = 1 << 23
MOST_ROWS = 100_000


def is_row_due(step: int, log_interval: int) -> bool:
    """Return whether experts.jsonl has a row after ``step``: a function of the step alone, alike after a resume."""
    interval = max(log_interval, 1)
    while step > ROWS * interval:
        interval *= 2
    return step % interval == 0


def row_of(step: int, steps: int, counts: LayerCounts) -> str:
    """Return a line of experts.jsonl, without its newline: the sums over the last ``steps`` steps."""
    means: dict[str, list[Any]] = {"dropped": [int(n) for n in counts.sums.get("dropped", ())]}
    means |= {name: _rounded(counts.mean(name)) for name in MEANS if name in counts.sums}
    return json.dumps({
        "step": step, "steps": steps, "top_k": counts.top_k, "layers": list(counts.layers),
        "tokens": counts.tokens.tolist(), **{name: values for name, values in means.items() if values},
    }, allow_nan=False, separators=(",", ":"))


def _rounded(values: Sums) -> list[float]:
    """Six digits of each; empty where one is not finite."""
    return [float(f"{v:.6g}") for v in values] if np.isfinite(values).all() else []


class ExpertFile:
    """Appends to experts.jsonl; options as of :class:`megatron_port.ext.telemetry.metrics.MetricsWriter`.

    Steps between rows are summed. Rows of steps after ``resumed_step`` are removed; of the steps that the last row left
    open, an attempt that crashed leaves nothing.
    """

    def __init__(
        self, path: Path, log_interval: int, resumed_step: int = 0, guard: Callable[[], None] = lambda: None
    ) -> None:
        self._interval, self._guard = log_interval, guard
        self._sum: LayerCounts | None = None
        self._steps = self._last = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        guard()
        if path.exists():
            _truncate(path, resumed_step, guard)
        self._stream: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def step(self, step: int, counts: LayerCounts) -> None:
        """Add a step, and write the row if one is due. OSError: the file system refused."""
        self._sum = counts if self._sum is None else self._sum.plus(counts)
        self._steps, self._last = self._steps + 1, step
        if is_row_due(step, self._interval):
            self._write()

    def close(self) -> None:
        """Write what is left, and close; a second call does nothing."""
        if not self._stream.closed:
            try:
                self._write()
                os.fsync(self._stream.fileno())
            finally:
                self._stream.close()

    def _write(self) -> None:
        if self._sum is None:
            return
        line = row_of(self._last, self._steps, self._sum)
        self._sum, self._steps = None, 0
        self._guard()
        self._stream.write((line + "\n").encode())


class ExpertSink:
    """Keeps experts.jsonl, and names experts that starve. Nothing is written once the folder is another attempt's."""

    def __init__(
        self, folder: Path, config: RunConfig, resumed_step: int, warn: Callable[[str], None], guard: Callable[[], None]
    ) -> None:
        self._warn = warn
        self._starving = StarvingExperts(config.moe)
        self._file = ExpertFile(folder / FILE_NAME, config.training.log_interval, resumed_step, guard)
        self.counts: LayerCounts | None = None
        """Of the step whose record is written next."""

    def write(self, record: Record) -> None:
        """Take the counts of a training step; an evaluation has none."""
        counts, self.counts = self.counts, None
        if counts is None:
            return
        step = int(record["step"] or 0)
        line = self._starving.step(step, counts)
        if line:
            self._warn(line)
        with suppress(LeaseLost):  # the loop says why, and ends
            self._file.step(step, counts)

    def close(self) -> None:
        """Write the steps since the last row, and close."""
        with suppress(LeaseLost):
            self._file.close()


def _truncate(path: Path, resumed_step: int, guard: Callable[[], None]) -> None:
    source = open_regular(path, follow=True)
    with open(source, encoding="utf-8", errors="replace") as old, atomic_file(path, guard=guard) as new:
        for row, line in _rows(old):
            if row is not None and row["step"] <= resumed_step:
                new.write(line.encode())


def read_rows(path: Path, on_bad: Callable[[], None] = lambda: None) -> Iterator[tuple[int, int, LayerCounts]]:
    """Return (step, steps, sums over them) of each row; ``on_bad`` is called for lines that no run writes.

    Means are sums again, as near as six digits tell. Raises OSError.
    """
    shape: tuple[int, ...] = ()
    with open(open_regular(path, follow=True), encoding="utf-8", errors="replace") as stream:
        for row, line in _rows(stream):
            if row is None or shape not in ((), row["counts"].tokens.shape):
                if line.strip():
                    on_bad()
                continue
            shape = row["counts"].tokens.shape
            yield row["step"], row["steps"], row["counts"]


def _rows(stream: Any) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Lines, each with what it holds; None: torn, or not a row."""
    for _ in range(MOST_ROWS):
        line = stream.readline(LINE_BYTES)
        if not line:
            return
        try:
            yield _decoded(parse_json(line)), line
        except (ValueError, TypeError, KeyError, OverflowError):
            yield None, line


def _decoded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return step, steps and counts of a row. ValueError, TypeError, KeyError: it is none."""
    step, steps, k = (_whole(raw[name]) for name in ("step", "steps", "top_k"))
    layers, tokens = tuple(_whole(n) for n in raw["layers"]), [[_whole(n) for n in row] for row in raw["tokens"]]
    counts = np.array(tokens, dtype=np.int64)
    if counts.ndim != 2 or len(layers) != len(counts) or not (counts.sum(axis=1) > 0).all() or not steps or not k:
        raise ValueError("not a row")
    found = LayerCounts(layers, counts, {}, k)
    factors: dict[str, Any] = {"dropped": 1, **dict.fromkeys(MEANS, found.routed)}
    sums = {name: _column(raw[name], len(layers)) * by for name, by in factors.items() if name in raw}
    return {"step": step, "steps": steps, "counts": LayerCounts(layers, counts, sums, k)}


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"not a count: {value!r}")
    return value


def _column(values: Sequence[Any], count: int) -> Sums:
    found = np.array([float(v) for v in values], dtype=np.float64)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise ValueError("not a number per layer")
    return found


counts_of = LayerCounts.of
"""What finds the counts of a step (``registry.PARTS``)."""
