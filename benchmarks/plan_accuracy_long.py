"""Planner against published steps with long sequences: `python benchmarks/plan_accuracy_long.py` writes
benchmarks/results/plan-accuracy-long.md.

As ``plan_accuracy``: no constant is fitted to a row, and what a source does not say is assumed once for the source.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from programs import FSDP2, FSDP2_ASYNC, LLAMA3, megatron_split
from published_split import Line, used

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.io.files import write_text
from megatron_port.tools.plan.case import Case, machine_of
from megatron_port.tools.plan.engines import Engine
from megatron_port.tools.plan.step import StepPlan, plan_step

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "plan-accuracy-long.md"


@dataclass(frozen=True)
class Row:
    """A published point and its plan."""

    line: int
    source: str
    case: Case
    plan: StepPlan
    tflops: float
    """Published, of one device; 0: none."""
    tokens: float
    """Published tokens per second of one device; 0: none."""

    @property
    def planned_tokens(self) -> float:
        """Planned tokens per second of one device."""
        return self.plan.tokens_per_second / self.case.world

    @property
    def exchange(self) -> float:
        """Share of the planned step in which context-parallel ranks exchange keys and values."""
        return self.plan.split.context / self.plan.seconds


def engine_of(row: dict[str, str]) -> Engine:
    """Whose program a line is of. torchtitan had asynchronous tensor parallelism in its table of 405B."""
    if not row["source"].startswith("torchtitan"):
        return LLAMA3
    return FSDP2_ASYNC if int(row["tp"]) > 1 else FSDP2


def case_of_row(row: dict[str, str]) -> Case:
    """The case that a line describes."""
    number = {k: int(row[k]) for k in (
        "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tp", "pp", "dp", "cp", "micro_batch",
        "global_batch", "zero",
    )}
    model = ModelConfig(
        name=row["model"], num_layers=number["layers"], hidden_size=number["hidden"],
        num_attention_heads=number["heads"], num_query_groups=number["kv_heads"], ffn_hidden_size=number["ffn"],
        vocab_size=number["vocab"], seq_length=number["seq"], hidden_dropout=0.0, attention_dropout=0.0,
        activation="swiglu", normalization="rmsnorm", position_embedding="rope", add_bias=False, tie_embeddings=False,
    )
    vp = int(row["vp_interleave"] or 1)
    return Case(
        model=model, engine=engine_of(row), tp=number["tp"],
        pp=number["pp"], vp=vp, dp=number["dp"], cp=number["cp"], cp_method=row["cp_method"],
        sequence_parallel=number["tp"] > 1, zero_stage=number["zero"], recompute=row["recompute"],
        micro_batch=number["micro_batch"], global_batch=number["global_batch"], dtype=row["precision"],
        micro_batches=number["global_batch"] // (number["dp"] * number["micro_batch"]),
        split=megatron_split(model, number["pp"] * vp),
    )


def rows(lines: list[Line]) -> list[Row]:
    """Every published point with its plan; where interleaving is not printed, the fastest of one, two or four chunks
    on each stage."""
    machine, out = machine_of(load("clusters/dgx-h100").config), []
    for line in lines:
        number, row = line.number, line.row
        case = case_of_row(row)
        cases = [case]
        if case.pp > 1 and not row["vp_interleave"]:
            cases += [replace(case, vp=v, split=megatron_split(case.model, case.pp * v)) for v in (2, 4)]
        plans = [(plan_step(one, machine), one) for one in cases]
        plan, case = min(plans, key=lambda pair: pair[0].seconds)
        published = float(row["tflops_per_gpu"] or 0), float(row["tokens_per_s_per_gpu"] or 0)
        out.append(Row(number, row["source"], case, plan, *published))
    return out


def read_points() -> list[Line]:
    """Lines of points-long.csv that are not set aside."""
    return used("points-long.csv")


@dataclass(frozen=True)
class Slowdown:
    """How many times as long a token takes as in the first row of its table, which divides its sequences by nobody."""

    row: Row
    published: float
    planned: float
    free: float
    """Planned, were the exchange of keys and values free."""
    contiguous: float
    """Planned, if each rank had one run of the sequence."""


def slowdowns(found: list[Row]) -> list[Slowdown]:
    """Rows of tables that print tokens per second, by their first."""
    machine, first = machine_of(load("clusters/dgx-h100").config), {}
    out = []
    for r in found:
        one = first.setdefault(r.source, r)
        if r.tokens and r is not one:
            planned = one.planned_tokens / r.planned_tokens
            worse = plan_step(replace(r.case, cp_order="contiguous"), machine).seconds / r.plan.seconds
            out.append(Slowdown(r, one.tokens / r.tokens, planned, planned * (1 - r.exchange), planned * worse))
    return out


INTRODUCTION = """# Planner against published steps with long sequences

Written by `python benchmarks/plan_accuracy_long.py` from `configs/published/points-long.csv`; docs/planner.md says how
a step is planned. No constant was fitted to these rows.

**Llama 3.** The table of 430, 400 and 380 TFLOP/s names neither the interleaving, the recompute policy nor which pairs
of attention its rate counts, so planned rates are given by both counts: with all pairs, as in this program, and with
the causal half. By all pairs the planned seconds are 4 to 8 % too few in all three rows; by the causal half the long
one would be 32 % too many. Planned as `programs.LLAMA3`: nothing hides tensor parallelism's collectives, and
attention is FlashAttention-2's; without recompute, with the fastest of one, two or four chunks on each stage, gradients
summed once per step behind the passes, keys and values gathered before attention, and documents as long as the sequence
(its report masks between documents, which saves work).

**torchtitan.** Its GPUs are H100 with 96 GB and 500 W, and its 8-bit layers are compiled (plan-accuracy-more.md has its
seconds on such a cluster). Here rates are compared within a table: the time of a token by that of the table's first
row, whose sequences no ranks divide. Taken: full recompute, ZeRO-3 over dp x cp, gathered keys and values, zigzag.
Published tokens per second of the 405B rows are whole numbers from 16 to 76, up to 3 % off. Published times lie between
what is planned for zigzag and for contiguous order; which of them ran is not printed.

DeepSpeed-Ulysses prints rates in pictures without their layouts; no row of it is here.
"""


def rate_lines(found: list[Row]) -> list[str]:
    """Rates of the rows that print them, by both counts."""
    out = [
        "| devices | sequence | layout | published TFLOP/s | planned, all pairs | planned, causal half | exchange |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in found if r.tflops):
        counts = (f"{rate:.0f} ({rate / r.tflops - 1:+.0%})" for rate in (r.plan.model_tflops, r.plan.causal_tflops))
        out.append(
            f"| {r.case.world} | {r.case.model.seq_length} | {r.case.label()} | {r.tflops:.0f} | {' | '.join(counts)} "
            f"| {r.exchange:.1%} |"
        )
    return out


def slowdown_lines(found: list[Slowdown]) -> list[str]:
    """How many times as long a token takes as in the first row."""
    out = [
        "| line | table | model | sequence | layout | published | planned | error | exchange free | contiguous |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for s in found:
        case = s.row.case
        out.append(
            f"| {s.row.line} | {s.row.source} | {case.model.name} | {case.model.seq_length} | {case.label()} | "
            f"{s.published:.2f} | {s.planned:.2f} | {s.planned / s.published - 1:+.1%} | "
            f"{s.free / s.published - 1:+.1%} | {s.contiguous:.2f} |"
        )
    mean, free = (statistics.mean(abs(x / s.published - 1) for s, x in pairs) for pairs in (
        [(s, s.planned) for s in found], [(s, s.free) for s in found],
    ))
    return [*out, "", f"Mean absolute error {mean:.1%}; {free:.1%} if the exchange were free."]


def report(found: list[Row]) -> str:
    """The whole page."""
    text = [
        INTRODUCTION, "## Rates: Llama 3 405B", "", *rate_lines(found), "",
        "## Time of a token, by that of the first row: torchtitan", "", *slowdown_lines(slowdowns(found)),
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    """Write the tables."""
    found = rows(read_points())
    write_text(RESULT, report(found))
    print("\n".join([*rate_lines(found), "", *slowdown_lines(slowdowns(found))]))


if __name__ == "__main__":
    main()
