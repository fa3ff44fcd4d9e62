"""Claims of the sources, judged: `python benchmarks/claims.py` prints each with what the planner finds.

docs/claims.toml has the claims: item, source, number, the source's tolerance and the function here that gives the
project's own number. `--write` puts the table into benchmarks/evidence/coverage.md; a test holds both to what is
computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import plan_accuracy
import plan_accuracy_long
import plan_accuracy_moe
from programs import Program

from megatron_port.core.config.loader import load
from megatron_port.core.io.files import write_text
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.tools.plan import arithmetic
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.memory import plan_memory
from megatron_port.tools.plan.step import plan_step

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = ROOT / "docs" / "claims.toml"
PAGE = ROOT / "benchmarks" / "evidence" / "coverage.md"
BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"


@cache
def frontier() -> dict[int, Any]:
    """The rows of Frontier by line of points.csv."""
    lines = [line for line in plan_accuracy.read_points() if line.row["source"].startswith("Dash")]
    return {r.line: r for r in plan_accuracy.rows(lines)}


def frontier_error(line: int, published: float) -> float:
    """Percent by which the planned time is off."""
    return 100 * (published / frontier()[line].plan.hardware_tflops - 1)


def strong(line: int) -> float:
    """Percent of one replica's rate that is left, strong scaling."""
    row = frontier()[line]
    one = replace(row.case, dp=1, micro_batches=row.case.global_batch // row.case.micro_batch)
    return float(100 * row.plan.hardware_tflops / plan_step(one, row.machine).hardware_tflops)


def weak() -> float:
    """Percent of the rate on 1,024 devices that is left on 3,072."""
    rows = frontier()
    return float(100 * rows[7].plan.hardware_tflops / rows[5].plan.hardware_tflops)


def weak_replicas(line: int, few: int, many: int) -> float:
    """Percent of the rate of a few replicas that is left with many, each with its own share of the batch."""
    row = frontier()[line]
    samples = row.case.micro_batches * row.case.micro_batch
    cases = [replace(row.case, dp=dp, global_batch=dp * samples) for dp in (few, many)]
    rates = [plan_step(case, row.machine).hardware_tflops for case in cases]
    return float(100 * rates[1] / rates[0])


def _run(name: str) -> tuple[Case, Machine]:
    config = load(f"runs/frontier-{name}").config
    return case_of(config, allow_fractions=True)[0], machine_of(config)


def ratio_parts(name: str, few: int, many: int) -> dict[str, float]:
    """Percent of the rate lost from few stages to many at eight micro-batches for each stage (III.4), by cause."""
    case, machine = _run(name)
    found = []
    for pp in (few, many):
        m = 8 * pp
        one = replace(case, pp=pp, dp=1, vp=1, split=(), micro_batches=m, global_batch=m * case.micro_batch)
        split, share = plan_step(one, machine).split.parts(), one.world / one.global_batch
        found.append({name: seconds * share for name, seconds in split.items()})
    whole = sum(found[1].values())
    return {name: 100 * (found[1][name] - found[0][name]) / whole for name in found[0]}


def ratio_loss(name: str, few: int, many: int) -> float:
    """Percent of the rate that is lost so, all causes together."""
    return sum(ratio_parts(name, few, many).values())


def flash_gain() -> float:
    """Percent more throughput of fused attention over scores that are written out, the most of the three models."""
    found = []
    for name in ("22b", "175b", "1t"):
        case, machine = _run(name)
        slow, fast = (plan_step(replace(case, flash=f, kernels="torch"), machine).seconds for f in (False, True))
        found.append(100 * (slow / fast - 1))
    return max(found)


def deepseek_hours() -> float:
    """Percent by which DeepSeek-V3's planned hours are off."""
    lines = plan_accuracy_moe.read_points()
    (row,) = plan_accuracy_moe.rows([x for x in lines if x.row["source"].startswith("DeepSeek-V3 report")])
    return float(100 * row.error)


def llama(index: int) -> float:
    """Percent by which the planned time of a row of Llama 3 405B is off, all pairs of attention counted."""
    found = _llama()
    return float(100 * (found[index].tflops / found[index].plan.model_tflops - 1))


@cache
def _llama() -> list[Any]:
    return [r for r in plan_accuracy_long.rows(plan_accuracy_long.read_points()) if r.tflops]


@cache
def dense() -> list[plan_accuracy.Row]:
    """The used rows of points.csv that have a time, without the one that calibrates."""
    rows = plan_accuracy.rows(plan_accuracy.read_points())
    return [r for r in rows if r.measured and not r.calibration]


def _error(row: plan_accuracy.Row) -> float:
    assert row.measured is not None
    return 100 * (row.plan.seconds / row.measured - 1)


def dense_error() -> float:
    """Mean absolute error of the used rows of points.csv, percent."""
    return fmean(abs(_error(r)) for r in dense())


def consistent_error() -> float:
    """The same without rows that contradict others of their layout."""
    unlike = plan_accuracy.contradicted(dense())
    return fmean(abs(_error(r)) for r in dense() if r.line not in unlike)


def bias(source: str, dtype: str) -> float:
    """Mean error of a source's rows, percent."""
    return fmean(_error(r) for r in dense() if r.source == source and r.case.dtype == dtype)


def regret(model: str) -> float:
    """Percent that the layout planned fastest of a model's published ones takes longer than the fastest measured."""
    (found,) = [pair for pair in plan_accuracy.regrets(dense()) if pair[1].case.model.name == model]
    chosen, best = found[0].measured, found[1].measured
    assert chosen is not None and best is not None
    return 100 * (chosen / best - 1)


def row_rate(line: int, what: str) -> float:
    """Planned rate of a line of points.csv: ``hardware`` TFLOP/s with recompute, or ``mfu`` in percent."""
    row = next(r for r in dense() if r.line == line)
    return 100 * row.plan.mfu if what == "mfu" else row.plan.hardware_tflops


def gain(slow: int, fast: int) -> float:
    """Percent more throughput of one planned line of points.csv than of another with the same batch."""
    first, second = (next(r for r in dense() if r.line == line).plan.seconds for line in (slow, fast))
    return 100 * (first / second - 1)


def judged_error(page: str) -> float:
    """Mean absolute error of all judged rows, percent, of a committed page that a test holds to what is computed."""
    text = (ROOT / "benchmarks" / "results" / page).read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| **all judged** |")]
    return float(line.split("|")[4].strip().rstrip("%"))


def peaks_within() -> float:
    """Percent of Megatron-core's runs whose peak is planned within 10 %, of the committed page."""
    text = (ROOT / "benchmarks" / "results" / "plan-memory-mcore.md").read_text()
    (line,) = [line for line in text.splitlines() if "peaks within 10 %" in line]
    within, _, runs = line.split()[:3]
    return 100 * int(within) / int(runs)


def observed(what: str) -> float:
    """Percent of the rate lost (III.1: tp 1 to 8, 1.4B on 8 GCDs; III.3: 4 to 24 stages of 22B at 64 micro-batches) or
    won (III.2: 8 to 256 micro-batches of 22B on 8 stages)."""
    case, machine = _run("1.4b" if what == "III.1" else "22b")
    case = replace(case, split=(), vp=1)
    changes: list[dict[str, Any]] = {
        "III.1": [{"tp": t, "pp": 1, "dp": 8 // t, "micro_batches": 8 * t, "global_batch": 64} for t in (1, 8)],
        "III.2": [{"tp": 1, "pp": 8, "dp": 2, "micro_batches": m, "global_batch": 2 * m} for m in (256, 8)],
        "III.3": [{"tp": 1, "pp": p, "dp": 1, "micro_batches": 64, "global_batch": 64} for p in (4, 24)],
    }[what]
    first, second = (plan_step(replace(case, micro_batch=1, **c), machine).hardware_tflops for c in changes)
    return 100 * (first / second - 1) if what == "III.2" else 100 * (1 - second / first)


def llama2_gigabytes() -> float:
    """Weights, gradients, optimizer and activations of Llama-2 70B without tensor parallelism."""
    return arithmetic.simple_memory(70e9, layers=80, hidden=8192, sequence=4096, batch=8).total / 1e9


def widest(peak: float, link: float) -> float:
    """Largest tensor-parallel size at which a link keeps up with hidden size 8192."""
    return arithmetic.widest_tensor_parallelism(8192, peak=peak * 1e12, link=link * 1e9)


def parameters(model: str) -> float:
    """Parameters of a shipped model, 10^9."""
    return parameter_count(load(model).config.model) / 1e9


def training_days() -> float:
    """175B on 300 B tokens by 1,024 A800 at half their peak."""
    return arithmetic.days(arithmetic.training_flops(175e9, 300e9), peak=312e12, utilisation=0.5, devices=1024)


def bubble(stages: int, micro_batches: int) -> float:
    """Percent of the useful time that a pipeline waits."""
    return 100 * arithmetic.bubble_fraction(stages, micro_batches)


def of_peak(rate: float) -> float:
    """Percent of a GCD's peak that a rate in TFLOP/s is."""
    return 100 * rate / load("clusters/frontier").config.cluster.peak_tflops


def without_recompute(line: int, rate: float) -> float:
    """Percent of the peak that a published rate is when recomputed FLOPs are not counted."""
    plan = frontier()[line].plan
    return float(of_peak(rate * plan.model_tflops / plan.hardware_tflops))


def share_of_frontier(devices: int) -> float:
    """Percent of Frontier's 9,472 nodes that so many GCDs are."""
    return 100 * devices / (9472 * load("clusters/frontier").config.cluster.gpus_per_node)


def llama2_devices(gigabytes: float) -> float:
    """Devices that Llama-2 70B needs so."""
    return arithmetic.simple_memory(70e9, layers=80, hidden=8192, sequence=4096, batch=8).devices(gigabytes * 1e9)


def korthikanti_activations() -> float:
    """GiB of activations of the 22B model with sequence parallelism and selective recompute, tp 8, batch 4."""
    layer = arithmetic.layer_activations(
        sequence=2048, batch=4, hidden=6144, heads=64, tensor=8, sequence_parallel=True, scores=False
    )
    return 48 * layer / 2**30


def stages_error(mebibytes: list[int]) -> float:
    """Percent by which the plan of the stages of the 175B run is off at the most."""
    case, machine = _run("175b")
    # The measured program kept fp16 gradients and accumulated in them; ours accumulates in fp32.
    case = replace(case, engine=Program(name="Megatron-DeepSpeed", gradient_bytes=2, bucket_bytes=0.0))
    planned = [stage.allocated / 2**20 for stage in plan_memory(case, machine)]
    return max(100 * abs(p / m - 1) for p, m in zip(planned, mebibytes, strict=True))


def a800(what: str) -> float:
    """175B on 1,024 A800 by this program's own engine: "mfu" in percent, or "days" for 300 B tokens."""
    config = load(["models/gpt-175b", "clusters/a800"], [
        "engine=native", "cluster.nodes=128", "layout.tensor_parallel_size=8", "layout.pipeline_parallel_size=8",
        "layout.sequence_parallel=true", "layout.virtual_pipeline_size=6", "batch.micro_batch_size=1",
        "batch.global_batch_size=1536", "precision.dtype=bf16", "data.synthetic=true",
    ]).config
    case = case_of(config)[0]
    step = plan_step(case, machine_of(config))
    tokens = case.global_batch * case.model.seq_length
    return float(100 * step.mfu if what == "mfu" else 300e9 / tokens * step.seconds / 86400)


def ledger_error() -> float:
    """Percent by which a planned peak of the record is off at the most."""
    rows = (ROOT / "benchmarks" / "results" / "memory-ledger.jsonl").read_text().splitlines()
    return max(100 * abs(json.loads(row)["off"]) for row in rows)


MEASURES: dict[str, Callable[..., float]] = {
    f.__name__: f for f in (
        frontier_error, strong, weak, weak_replicas, ratio_loss, flash_gain, deepseek_hours, llama, dense_error,
        llama2_gigabytes, widest, training_days, parameters, bubble, of_peak, without_recompute, share_of_frontier,
        llama2_devices, korthikanti_activations, stages_error, a800, ledger_error, bias, regret, row_rate, gain,
        judged_error, peaks_within, observed, consistent_error,
    )
} | {"per_parameter": lambda parameters, size: parameters * size / 1e12}


@dataclass(frozen=True)
class Claim:
    """A claim and what was found."""

    item: str
    source: str
    number: float
    tolerance: float
    unit: str
    holds: bool
    why: str
    value: float
    command: str
    least: bool = False
    """The source says "more than"."""

    @property
    def said(self) -> str:
        """What the source says."""
        tolerance = f" ± {self.tolerance:g}" if self.tolerance or not self.least else ""
        return f"{'more than ' if self.least else ''}{self.number:g}{tolerance} {self.unit}".strip()

    @property
    def found(self) -> bool:
        """Whether the project's number is within the source's tolerance; of "more than" not below it."""
        if self.least:
            return self.value >= self.number - self.tolerance
        return abs(self.value - self.number) <= self.tolerance


def claims() -> list[Claim]:
    """Every claim, computed."""
    out = []
    for entry in tomllib.loads(CLAIMS.read_text())["claim"]:
        value = MEASURES[entry["measure"]](*entry.get("arguments", []))
        out.append(Claim(
            entry["item"], entry["source"], float(entry["number"]), float(entry["tolerance"]), entry["unit"],
            entry["holds"], entry.get("why", ""), float(value), entry["command"],
            entry.get("least", False),
        ))
    return out


def table(found: list[Claim]) -> str:
    """The part of benchmarks/evidence/coverage.md."""
    lines = [BEGIN, "", "| what | shown by | result |", "|---|---|---|"]
    for c in found:
        verdict = "holds" if c.found else f"**does not hold**: {c.why}"
        lines.append(
            f"| {c.item}; {c.source}: {c.said} | `{c.command}` | "
            f"{f'{c.value:.4g} {c.unit}'.strip()}, {verdict} |"
        )
    return "\n".join([*lines, "", END])


def page(found: list[Claim]) -> str:
    """The whole of benchmarks/evidence/coverage.md with the table in its place."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN, 1)
    return before + table(found) + rest.split(END, 1)[1]


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/evidence/coverage.md")
    args = parser.parse_args()
    found = claims()
    if args.write:
        write_text(PAGE, page(found))
    print(table(found))


if __name__ == "__main__":
    main()
