"""Planner against the published steps of points2.csv: `python benchmarks/plan_accuracy_more.py` writes
benchmarks/results/plan-accuracy-more.md.

MoE, context parallelism, ZeRO-3, newer GPUs. As ``plan_accuracy``: no constant is fitted to a row, and what a source
does not say is assumed once for the source, in ``SOURCES`` and ``case_of_row``.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from programs import (
    DEEPSPEED_ZERO3,
    DEEPSPEED_ZERO3_HOST,
    FSDP2,
    FSDP2_ASYNC,
    MEGASCALE,
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_CORE_DEEP_EP,
    MEGATRON_CORE_FSDP,
    Program,
    fullest,
    megatron_split,
)
from published_split import Line, opened, used

from megatron_port.core.config.loader import load
from megatron_port.core.config.model import MoEConfig, RoutesConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.io.files import write_text
from megatron_port.tools.plan.case import Case, Machine, machine_of
from megatron_port.tools.plan.step import StepPlan, plan_step

RESULT = Path(__file__).resolve().parent / "results" / "plan-accuracy-more.md"
FILE = "points2.csv"
NATURAL = RoutesConfig().imbalance
CLUSTERS = {
    "H100": "dgx-h100", "GB200": "gb200", "GB300": "gb300", "B200": "b200", "H800": "h800",
    "H100-96GB HBM2e 500W": "h100-96gb", "A100-80GB (NDm v4, 8x200Gb IB)": "a100-ndv4",
}
INEXPRESSIBLE = {
    "gpt-1000b on V100-32GB DGX-2": "neither shape nor batch is printed",
    "qwen3-next-80b-a3b": "three of four layers are gated delta nets, which the model has not",
}
"""Model, or model on hardware → why no case describes it."""


@dataclass(frozen=True)
class Source:
    """How a group of sources is read."""

    engine: Program
    counts: str
    """What its TFLOP/s count: causal | full attention | hardware (recompute, full attention)."""
    folded: bool = True
    """Experts are not divided by tensor parallelism unless the row gives etp."""


SOURCES = {
    "bridge-25.09": Source(MEGATRON_BRIDGE, "causal"),
    "torchtitan-202412": Source(FSDP2, "full"),
    "moe-folding": Source(MEGATRON_CORE, "causal", folded=False),
    "mcore-moe-report": Source(MEGATRON_CORE_DEEP_EP, "causal"),
    "moe-modelzoo": Source(MEGATRON_CORE_DEEP_EP, "causal"),
    "megascale-moe": Source(MEGASCALE, "full"),
    "deepspeed": Source(DEEPSPEED_ZERO3, "hardware"),
    "olmo-core": Source(FSDP2, "full"),
}


@dataclass(frozen=True)
class Row:
    """A published point and its plan."""

    line: Line
    case: Case
    machine: Machine
    fits: bool
    measured: float
    """Seconds; 0: the row is of a run that was out of memory."""
    plan: StepPlan
    note: str

    @property
    def error(self) -> float:
        """Relative error of the planned seconds."""
        return self.plan.seconds / self.measured - 1

    @property
    def group(self) -> str:
        """Whose rows it is one of."""
        return self.line.row["source_group"]

    @property
    def program(self) -> str:
        """The group, and its program where it compares several."""
        source, kind = self.line.row["source"], self.group
        if kind == "moe-folding":
            return f"{kind}, {source.split(maxsplit=5)[-1]}"
        if kind == "megascale-moe":
            return f"{kind}, {source.split()[-1]}"
        return f"{kind}, {'8 bits' if self.case.dtype == 'fp8' else '16 bits'}"


def why_not(row: dict[str, str]) -> str:
    """Why no case describes a line; empty: one does."""
    return INEXPRESSIBLE.get(row["model"]) or INEXPRESSIBLE.get(f"{row['model']} on {row['hardware']}", "")


def model_of(row: dict[str, str]) -> ModelConfig:
    """The model of a line."""
    name, latent = row["model"], {}
    gpt = name.startswith("gpt-")
    if name == "deepseek-v3":
        latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 192}
        latent["mtp_layers"] = 1 if "MTP 1 counted" in row["note"] else 0
    elif name.startswith("qwen3"):
        latent = {"head_dim": 128, "qk_norm": True}
    heads, layers, hidden = int(row["heads"] or 0), int(row["layers"]), int(row["hidden"])
    moe = MoEConfig()
    if row["experts"]:
        wide = int(row["moe_ffn"])
        shared = int((row["shared_experts"] or "0").split()[0])
        moe = MoEConfig(
            num_experts=int(row["experts"]), top_k=int(row["top_k"] or 2), ffn_hidden_size=wide,
            shared_ffn_hidden_size=shared * (20480 if name.startswith("qwen2") else wide),
            first_dense=int(row["first_dense_layers"] or 0), shared_gate=name.startswith("qwen2"),
            groups=8 if name == "deepseek-v3" else 1, top_groups=4 if name == "deepseek-v3" else 1,
        )
    return ModelConfig(
        name=name, num_layers=layers, hidden_size=hidden, num_attention_heads=heads or hidden // 128,
        num_query_groups=int(row["kv_heads"] or 0), ffn_hidden_size=int(row["ffn"] or row["moe_ffn"] or 0),
        vocab_size=int(row["vocab"] or 50257), seq_length=int(row["seq"]), hidden_dropout=0.1 if gpt else 0.0,
        attention_dropout=0.1 if gpt else 0.0,  # Megatron-LM's defaults, which DeepSpeed's examples kept
        activation="gelu" if gpt else "swiglu", normalization="layernorm" if gpt else "rmsnorm",
        position_embedding="learned" if gpt else "rope", add_bias=gpt, tie_embeddings=gpt, moe=moe,
        **latent,  # type: ignore[arg-type]
    )


def engine_of(row: dict[str, str], source: Source) -> Program:
    """The program of a line."""
    engine = source.engine
    if row["source_group"] == "moe-folding" and "FSDP" in row["source"]:
        engine = MEGATRON_CORE_FSDP
    if "AsyncTP" in row["precision"] + row["note"]:
        engine = FSDP2_ASYNC
    if row["source"].endswith("Megatron-LM"):
        engine = MEGATRON_CORE
    if "MX" in row["precision"] or "block" in row["precision"]:
        engine = replace(engine, scaling="mx")
    if row["model"] == "deepseek-v3" and row["source_group"] == "mcore-moe-report":
        engine = replace(engine, moment_width=2)
    if row["source_group"] == "deepspeed" and float(row["params_b"]) > 500:
        engine = DEEPSPEED_ZERO3_HOST  # a layer's inputs alone are 49 GB and more
    return engine


def recompute_of(row: dict[str, str]) -> str:
    """none | full | experts. What selective recompute repeats beside experts is little: norms and activations."""
    text = row["recompute"]
    if text.startswith("full"):
        return "full"
    return "experts" if "moe" in _parts(text) else "none"


def _parts(text: str) -> list[str]:
    return text.removeprefix("selective ").replace(",", " ").split()


NAMES = {"norm": "layernorm", "act": "moe_act", **{n: n for n in ("layernorm", "moe_act", "mla_up_proj")}}
CHEAP = ("layernorm", "moe_act", "mla_up_proj")
"""What Megatron-core's recipes drop first."""


def modules_of(row: dict[str, str]) -> tuple[str, ...]:
    """Outputs that a line says are dropped and made again; the MoE report's "mlp" stands for its table 17's list."""
    if not row["recompute"].startswith("selective "):
        return ()
    if "mlp" in _parts(row["recompute"]):
        return CHEAP
    return tuple(dict.fromkeys(NAMES[p] for p in _parts(row["recompute"]) if p in NAMES))


def case_of_row(row: dict[str, str]) -> Case:
    """The case that a line describes; what it leaves blank is what a run of that program has by itself."""
    source = SOURCES[row["source_group"]]
    tp, pp, cp, ep = (int(row[k] or 1) for k in ("tp", "pp", "cp", "ep"))
    engine, heads = engine_of(row, source), row["source"].endswith("MegaScale-MoE")
    if heads:
        cp = 8  # its sequence-parallel attention divides tokens and replicates weights, as cp does
    dp = int(row["dp"] or 0) or (int(row["n_gpus"]) // (tp * pp * cp) if row["n_gpus"] else 64)
    micro = 1 if pp > 1 and row["source_group"] == "torchtitan-202412" else int(row["micro_batch"] or 1)
    if row["model"] == "gpt-530b":
        micro = 8  # not printed; that of the other rows of its table
    batch = int(row["global_batch"] or micro * dp)
    experts = bool(row["experts"])
    etp = int(row["etp"] or (tp if experts and (not source.folded or engine is MEGATRON_CORE) else 1))
    model = model_of(row)
    # Megatron-core may count embedding and head as a layer each.
    vp = min(int(row["vp_interleave"] or 1), max((model.num_layers + 2) // pp, 1))
    natural = row["forced_balance"] in ("no", "natural") or row["source_group"] == "megascale-moe"
    eight = any(word in row["precision"].lower() for word in ("fp8", "float8"))
    return Case(
        model=model, engine=replace(engine, modules=modules_of(row)), tp=tp, pp=pp, vp=vp, dp=dp, cp=cp,
        cp_method="heads" if heads else "gather" if engine in (FSDP2, FSDP2_ASYNC) else "ring", ep=ep, etp=etp,
        imbalance=NATURAL if natural else 1.0, sequence_parallel=tp > 1,
        zero_stage=int((row["zero_stage"] or row["zero"] or "1")[0]), schedule="1f1b",
        recompute=recompute_of(row), micro_batch=micro, micro_batches=math.ceil(batch / (micro * dp)),
        global_batch=batch,
        dropped=(("norm1", "norm2", "activation"),) * model.num_layers if "per op" in row["recompute"] else (),
        dtype="fp8" if eight else "fp16" if row["precision"].startswith("fp16") else "bf16",
        flash=row["source_group"] != "deepspeed",  # of July 2022, a month younger than FlashAttention
        split=megatron_split(model, pp * vp),
    )


def best_unknowns(case: Case, machine: Machine, row: dict[str, str]) -> tuple[Case, bool]:
    """The fastest of what a line does not print (interleaving, recompute) that fits, and whether any does."""
    found: list[tuple[float, Case]] = []
    least = (math.inf, case)
    chunks = (1,) if row["vp_interleave"] or case.pp == 1 or case.zero_stage == 3 else (1, 2, 4, 5, 7, 8, 14)
    if row["source"].startswith("torchtitan") and "Interleaved" in row["note"]:
        chunks = (2,)
    policies: tuple[tuple[str, tuple[str, ...]], ...] = ((case.recompute, case.engine.modules),)
    # The folding paper prints no recompute; Megatron-core's of single modules (0.12) is younger than it.
    if not row["recompute"] and row["source_group"] != "moe-folding":
        more = (("none", CHEAP), ("experts", CHEAP)) if row["experts"] else ()
        policies = (("none", ()), *more, ("full", ()))
    for vp in chunks:
        vp = vp if chunks != (1,) else case.vp
        if vp > 1 and (case.model.num_layers + 2 < case.pp * vp or case.micro_batches % case.pp):
            continue
        for recompute, modules in policies:
            split = megatron_split(case.model, case.pp * vp)
            one = replace(case, vp=vp, recompute=recompute, engine=replace(case.engine, modules=modules), split=split)
            memory = fullest(one, machine).total
            least = min(least, (memory, one), key=lambda x: x[0])
            if memory <= machine.cluster.memory_gb * 1e9:
                found.append((plan_step(one, machine, quick=True).seconds, one))
                break  # more recompute only costs
    return (min(found, key=lambda x: x[0])[1], True) if found else (least[1], False)


@cache
def machine_named(name: str) -> Machine:
    """A shipped cluster."""
    return machine_of(load(f"clusters/{name}").config)


def measured_seconds(row: dict[str, str], step: StepPlan) -> float:
    """Seconds of a step as published: printed, from tokens/s, or from TFLOP/s by the source's count."""
    if row["source_group"] == "bridge-25.09":
        return float(row["iter_time_if_causal_s"])
    if row["iter_time_s"]:
        return float(row["iter_time_s"])
    if row["tflops_per_gpu"]:
        counts = SOURCES[row["source_group"]].counts
        rate = {"causal": step.causal_tflops, "full": step.model_tflops, "hardware": step.hardware_tflops}[counts]
        return step.seconds * rate / float(row["tflops_per_gpu"])
    return step.seconds * step.tokens_per_second / int(row["n_gpus"] or 64) / float(row["tokens_per_s_per_gpu"])


def row_of(line: Line) -> Row:
    """A line with its plan."""
    row = line.row
    case, machine = case_of_row(row), machine_named(CLUSTERS[row["hardware"]])
    case, fits = best_unknowns(case, machine, row)
    step = plan_step(case, machine)
    lost = "OUT OF MEMORY" in row["note"]
    return Row(line, case, machine, fits, 0.0 if lost else measured_seconds(row, step), step, row["doubt"])


def rows(lines: Iterable[Line]) -> list[Row]:
    """Every line that a case describes, with its plan."""
    return [row_of(line) for line in lines if not why_not(line.row)]


def judged(found: list[Row]) -> list[Row]:
    """Rows that ran, and of which the source leaves no doubt."""
    return [r for r in found if r.measured and not r.note]


def summary_lines(found: list[Row]) -> list[str]:
    """Errors by program and over all rows that are judged."""
    out = ["| source | rows | mean error | mean absolute | largest |", "|---|---|---|---|---|"]
    groups: dict[str, list[float]] = {}
    for r in judged(found):
        groups.setdefault(r.program, []).append(r.error)
    everything = [r.error for r in judged(found)]
    for name, errors in [*sorted(groups.items()), ("**all judged**", everything)]:
        size = [abs(e) for e in errors]
        out.append(
            f"| {name} | {len(errors)} | {statistics.mean(errors):+.1%} | {statistics.mean(size):.1%} | "
            f"{max(size):.1%} |"
        )
    return out


def fit_lines(found: list[Row]) -> list[str]:
    """What ran and is said not to fit, what did not and is said to."""
    unfit = [r for r in found if r.measured and not r.fits]
    lost = [r for r in found if not r.measured]
    names = ", ".join(f"line {r.line.number} ({fullest(r.case, r.machine).total / 1e9:.0f} GB)" for r in unfit)
    return [
        f"{len(lost)} rows were out of memory; {sum(not r.fits for r in lost)} of them are planned so. "
        f"{len(unfit)} rows that ran are planned over memory{': ' + names if names else ''}."
    ]


def report(found: list[Row]) -> str:
    """The whole page."""
    every = used(FILE)
    text = [
        "# Planner against further published steps", "",
        "Written by `python benchmarks/plan_accuracy_more.py` from `configs/published/points2.csv`, set-aside rows",
        "left out; docs/planner.md says how a step is planned. No constant was fitted to these rows. Micro-batch 1",
        "where none is printed; of interleaving and recompute, where neither is, the planner's fastest that fits. Rows",
        "with a `doubt` are planned and not judged. TFLOP/s count the causal half of attention for Megatron-Bridge,",
        "the MoE report, the ModelZoo and the folding paper (plan-accuracy-moe.md says why), recompute for",
        "DeepSpeed.", "",
        f"{len(found)} of {len(every)} rows that are not set aside are expressible. Not: "
        + "; ".join(f"line {x.number}, {why_not(x.row)}" for x in every if why_not(x.row)) + ".", "",
        *summary_lines(found), "", *fit_lines(found), "", "## Rows", "",
        "| line | source | model | hardware | layout | devices | batch | measured s | planned s | error | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        marks = [r.case.dtype, "not judged" if r.note else "", "" if r.fits else "planned over memory"]
        seconds = f"{r.measured:.3f} | {r.plan.seconds:.3f} | {r.error:+.1%}" if r.measured else "out of memory | | "
        text.append(
            f"| {r.line.number} | {r.line.row['source']} | {r.case.model.name} | {r.machine.cluster.name} | "
            f"{r.case.label()} | {r.case.world} | {r.case.global_batch} | {seconds} | "
            f"{', '.join(m for m in marks if m)} |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    """Write the table, or print the errors of the rows set aside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opening", help="entry of openings.jsonl: the set-aside rows instead, printed only")
    args = parser.parse_args()
    found = rows(opened(FILE, args.opening) if args.opening else used(FILE))
    if not args.opening:
        write_text(RESULT, report(found))
    print("\n".join([*summary_lines(found), "", *fit_lines(found)]))


if __name__ == "__main__":
    main()
