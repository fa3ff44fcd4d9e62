"""Claims of the sources, judged: `python benchmarks/claims.py` prints each with what the planner finds.

docs/claims.toml has the claims: item, source, number, the source's tolerance and the function here that gives the
project's own number. `--write` puts the table into docs/coverage.md; a test holds both to what is computed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import plan_accuracy
import plan_accuracy_long
import plan_accuracy_moe

from megatron_port.config.loader import load
from megatron_port.model.flops import parameter_count
from megatron_port.plan import arithmetic
from megatron_port.plan.case import Case, Machine, case_of, machine_of
from megatron_port.plan.step import plan_step
from megatron_port.runtime.atomic import write_text

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = ROOT / "docs" / "claims.toml"
PAGE = ROOT / "docs" / "coverage.md"
BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"


@cache
def frontier() -> dict[int, Any]:
    """The rows of Frontier by line of points.csv."""
    return {r.line: r for r in plan_accuracy.rows(plan_accuracy.read_points()) if r.source == "Dash"}


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
    rows = plan_accuracy_moe.rows(plan_accuracy_moe.read_points())
    return float(100 * next(r.error for r in rows if r.source.startswith("DeepSeek-V3 report")))


def llama(index: int) -> float:
    """Percent by which the planned time of a row of Llama 3 405B is off, all pairs of attention counted."""
    found = [r for r in plan_accuracy_long.rows(plan_accuracy_long.read_points()) if r.tflops]
    return float(100 * (found[index].tflops / found[index].plan.model_tflops - 1))


def dense_error() -> float:
    """Mean absolute error of the used rows of points.csv, percent."""
    rows = list(plan_accuracy.rows(plan_accuracy.read_points()))
    errors = [abs(r.plan.seconds / r.measured - 1) for r in rows if r.measured and not r.calibration]
    return 100 * sum(errors) / len(errors)


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


MEASURES: dict[str, Callable[..., float]] = {
    f.__name__: f for f in (
        frontier_error, strong, weak, ratio_loss, flash_gain, deepseek_hours, llama, dense_error, llama2_gigabytes,
        widest, training_days, parameters,
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

    @property
    def found(self) -> bool:
        """Whether the project's number is within the source's tolerance."""
        return abs(self.value - self.number) <= self.tolerance


def claims() -> list[Claim]:
    """Every claim, computed."""
    out = []
    for entry in tomllib.loads(CLAIMS.read_text())["claim"]:
        value = MEASURES[entry["measure"]](*entry.get("arguments", []))
        out.append(Claim(
            entry["item"], entry["source"], float(entry["number"]), float(entry["tolerance"]), entry["unit"],
            entry["holds"], entry.get("why", ""), float(value), entry["command"],
        ))
    return out


def table(found: list[Claim]) -> str:
    """The part of docs/coverage.md."""
    lines = [BEGIN, "", "| what | shown by | result |", "|---|---|---|"]
    for c in found:
        verdict = "holds" if c.found else f"**does not hold**: {c.why}"
        lines.append(
            f"| {c.item}; {c.source}: {c.number:g} ± {c.tolerance:g} {c.unit} | `{c.command}` | "
            f"{c.value:.4g} {c.unit}, {verdict} |"
        )
    return "\n".join([*lines, "", END])


def page(found: list[Claim]) -> str:
    """The whole of docs/coverage.md with the table in its place."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN, 1)
    return before + table(found) + rest.split(END, 1)[1]


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/coverage.md")
    args = parser.parse_args()
    found = claims()
    if args.write:
        write_text(PAGE, page(found))
    print(table(found))


if __name__ == "__main__":
    main()
